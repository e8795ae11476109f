"""Producers: generated outputs of MoE layers, in every layout, for every operation."""

from moetail.conformance.producers.aimed import aimed_cases
from moetail.conformance.producers.case import LAYOUTS, POISONS, Arguments, Case
from moetail.conformance.producers.models import MODELS, Model
from moetail.conformance.producers.sources import SOURCES

__all__ = ["LAYOUTS", "MODELS", "POISONS", "SOURCES", "Arguments", "Case", "Model", "aimed_cases"]
