"""The suite: one module a chapter of the contract, one test a rule.

It runs against any implementation: ``moetail check IMPL``, or
``pytest --pyargs moetail.conformance.suite --impl IMPL``.
"""
