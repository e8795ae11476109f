"""Which known deviation explains the elements that are wrong."""

from moetail.conformance.diagnosis.search import DEVIATIONS, Diagnosis, diagnose, rule_named
from moetail.conformance.diagnosis.simulate import simulate

__all__ = ["DEVIATIONS", "Diagnosis", "diagnose", "rule_named", "simulate"]
