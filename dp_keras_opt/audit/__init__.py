"""Audits: a lower bound on ε from an attack, to hold against the ε that the ledger claims.

Attack reports, on a model that one has: what attacks find, which proves no ε.

Canaries are put into the training data or left out by coin flips, a model is trained, and somebody
who sees what the training releases guesses the coins. Guesses that are right more often than any
(ε, δ)-private training allows refute the claim: a fault in clipping, noise, sampling or accounting.
"""

from dp_keras_opt.audit.attack_report import AttackReport, AttackResult, Rate, attack_report
from dp_keras_opt.audit.bounds import (
    many_run_bound,
    many_run_excess,
    many_run_mu_bound,
    membership_auc,
    one_run_bound,
    one_run_p_value,
)
from dp_keras_opt.audit.canaries import (
    AuditReport,
    canary_audit,
    inclusion_estimates,
    likelihood_ratio,
    matched_filter,
)
from dp_keras_opt.audit.exposure import exposure
from dp_keras_opt.audit.f_dp import (
    gaussian_epsilon,
    gaussian_mu_bound,
    gaussian_trade_off,
    trade_off_of,
    trade_off_p_value,
)
from dp_keras_opt.audit.scores import sequence_losses

__all__ = [
    "AttackReport",
    "AttackResult",
    "AuditReport",
    "Rate",
    "attack_report",
    "canary_audit",
    "exposure",
    "gaussian_epsilon",
    "gaussian_mu_bound",
    "gaussian_trade_off",
    "inclusion_estimates",
    "likelihood_ratio",
    "many_run_bound",
    "many_run_excess",
    "many_run_mu_bound",
    "matched_filter",
    "membership_auc",
    "one_run_bound",
    "one_run_p_value",
    "sequence_losses",
    "trade_off_of",
    "trade_off_p_value",
]
