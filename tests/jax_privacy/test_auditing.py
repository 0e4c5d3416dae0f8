"""Audits and attack reports against JAX Privacy's auditor, from the same scores."""

import numpy as np
import pytest
from jax_privacy import auditing
from scipy import spatial

from dp_keras_opt import audit

MEMBERS = np.random.default_rng(0).normal(1.5, 1, 500)
OTHERS = np.random.default_rng(1).normal(0, 1, 500)
AUDITOR = auditing.CanaryScoreAuditor(MEMBERS, OTHERS)


@pytest.mark.parametrize("threshold", [0.5, 2.0, 2.5])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_bounds_of_one_run(threshold, delta):
    correct, wrong = (int(np.sum(scores >= threshold)) for scores in (MEMBERS, OTHERS))
    explicit = auditing.Explicit(threshold)
    theirs = AUDITOR.epsilon_one_run(0.05, delta, threshold_strategy=explicit)
    ours = audit.one_run_bound(1000, correct + wrong, correct, delta)
    assert ours == pytest.approx(theirs, abs=1e-5)
    theirs = AUDITOR.epsilon_one_run_fdp(0.05, delta, threshold_strategy=explicit)
    mu = audit.gaussian_mu_bound(1000, correct + wrong, correct)
    assert audit.gaussian_epsilon(mu, delta) == pytest.approx(theirs, abs=1e-4)


def test_figures_of_a_report():
    rates = (0.01, 0.1, 0.25)
    report = audit.attack_report(
        None, None, None, scores={"mine": (MEMBERS, OTHERS)}, false_positive_rates=rates
    )
    (found,) = report.results
    # Theirs are of randomised tests: of the upper hull of the curve.
    points = np.stack([*map(np.asarray, found.roc)], axis=1)
    hull = spatial.ConvexHull(np.concatenate([points, [[1.0, 0.0]]]))
    assert hull.volume == pytest.approx(AUDITOR.attack_auroc(), rel=1e-9)
    upper = np.array(sorted(tuple(points[i]) for i in hull.vertices if i < len(points)))
    for rate in found.rates:
        theirs = AUDITOR.tpr_at_given_fpr(rate.false_positive_rate)
        assert np.interp(rate.false_positive_rate, *upper.T) == pytest.approx(theirs, rel=1e-9)
        assert rate.true_positive_rate <= theirs + 1e-9
