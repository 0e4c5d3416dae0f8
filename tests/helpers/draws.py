"""How many configurations hypothesis draws for a test that costs seconds."""

from hypothesis import HealthCheck, Phase, settings


def is_thorough():
    """Whether pytest was told `--thorough`."""
    return settings.get_current_profile_name() == "thorough"


def draws(count):
    """Settings: so many configurations, the same in every run; twenty times as many, and others, in
    a thorough run. A failure shows what was drawn as it was drawn: to shrink it would take minutes.
    """
    return settings(
        max_examples=20 * count if is_thorough() else count,
        derandomize=not is_thorough(),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
