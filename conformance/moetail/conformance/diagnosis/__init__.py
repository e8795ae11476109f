"""Which known deviation explains the elements that are wrong."""

from moetail.conformance.diagnosis.evidence import MOST_TERMS
from moetail.conformance.diagnosis.search import DEVIATIONS, Diagnosis, diagnose, rule_named
from moetail.conformance.diagnosis.simulate import simulate

__all__ = ["DEVIATIONS", "MOST_TERMS", "Diagnosis", "diagnose", "rule_named", "simulate"]
