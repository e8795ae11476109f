"""A pool of rank processes, started once and reused for every distributed case.

Importing torch in every rank costs more than the cases, so a pool has one *server* process, which
imports everything once, forks the ranks, hands calls to them and says what came of each::

    parent ── connection ──> server ── fork, connections ──> rank 0 .. size - 1

Processes, exit codes and connections are multiprocessing's. Own code stands where its pieces, as
they are from Python 3.10 to 3.14, do not serve. Its fork server imports the caller's ``__main__``
again in each child, is one for all that the caller runs, shares the caller's environment and
Ctrl-C, and has no documented way to stop. In its ``ForkingPickler`` torch has put reducers that
share memory and file descriptors, and tensors are to travel by value.

What outlives what does not rest on anybody's good behaviour. The server ends, ranks first, when the
parent's end of its connection closes, whatever closed it; the kernel kills a rank whose server is
gone; and a thread in each rank waits on its connection to the server.

Ranks find each other through a file in a temporary folder of the pool's own and, on the CPU, talk
over the loopback interface, so that pools side by side never meet.
"""

from moetail.conformance.run.ranks.errors import PoolError, RankError
from moetail.conformance.run.ranks.messages import Outcome, RankFailure
from moetail.conformance.run.ranks.pool import RankPool
from moetail.conformance.run.ranks.rank import end_with_parent

__all__ = ["Outcome", "PoolError", "RankError", "RankFailure", "RankPool", "end_with_parent"]
