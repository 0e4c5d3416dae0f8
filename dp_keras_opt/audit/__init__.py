"""Audits: a lower bound on ε from an attack, to hold against the ε that the ledger claims.

Canaries are put into the training data or left out by coin flips, a model is trained, and somebody
who sees what the training releases guesses the coins. Guesses that are right more often than any
(ε, δ)-private training allows refute the claim: a fault in clipping, noise, sampling or accounting.
"""

from dp_keras_opt.audit.bounds import (
    many_run_bound,
    membership_auc,
    one_run_bound,
    one_run_p_value,
)
from dp_keras_opt.audit.canaries import (
    AuditReport,
    canary_audit,
    inclusion_estimates,
    matched_filter,
)

__all__ = [
    "AuditReport",
    "canary_audit",
    "inclusion_estimates",
    "many_run_bound",
    "matched_filter",
    "membership_auc",
    "one_run_bound",
    "one_run_p_value",
]
