"""Producers: generated outputs of MoE layers, in every layout, for every operation."""

from moetail.conformance.cases.aimed import aimed_cases
from moetail.conformance.cases.case import CALLED, POISONS, Arguments, Case
from moetail.conformance.cases.models import MODELS, Model
from moetail.conformance.cases.sources import SOURCES

__all__ = ["CALLED", "MODELS", "POISONS", "SOURCES", "Arguments", "Case", "Model", "aimed_cases"]
