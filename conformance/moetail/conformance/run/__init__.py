"""One implementation under the suite: plan, trials, calls, ranks, results."""
