"""What a noise mechanism is, and what one release of it consists of."""

import abc
import dataclasses

import keras


class Mechanism(abc.ABC):
    """A distribution of noise together with the event that accounts for it.

    One object draws the noise and names its price, so the two cannot disagree. Whoever adds a
    noise writes one subclass and registers it with `keras.saving.register_keras_serializable`.

    A *unit* draw is the noise of a query whose sensitivity is 1 at noise multiplier 1; the
    privacy barrier scales it by noise multiplier × clip norm.
    """

    #: The norm in which queries must be clipped for `event` to hold: "l2" or "l1".
    norm: str

    @abc.abstractmethod
    def event(self, multiplier):
        """The `dp_accounting.DpEvent` of one release whose noise is `multiplier` × sensitivity."""

    @abc.abstractmethod
    def unit_noise(self, shapes, source):
        """Fresh unit draws, one float32 tensor for each of `shapes`, from the `NoiseSource`."""

    @abc.abstractmethod
    def std(self, step):
        """Standard deviation of one coordinate of the unit noise of step `step` (from 0)."""

    def get_config(self):
        """Constructor arguments, as in Keras."""
        return {}

    @classmethod
    def from_config(cls, config):
        """The mechanism with these constructor arguments."""
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), repr(self.get_config())))


@dataclasses.dataclass(frozen=True)
class Release:
    """One noisy answer that every step publishes; both the noise and its event follow from it.

    Attributes:
        query: index into `optimizer.queries()` of the query that is answered.
        statistic: "mean", the sum of the clipped gradients over the expected batch size.
        multiplier: noise multiplier σ, the noise's scale over the query's clip norm. 0 releases
            the statistic without noise: the ledger then says ε = ∞.
        mechanism: the `Mechanism` that the noise is drawn from.
    """

    query: int
    statistic: str
    multiplier: float
    mechanism: Mechanism


def get(identifier):
    """Resolves a mechanism as Keras resolves strings, configurations and objects.

    Args:
        identifier: a `Mechanism`, the name of one ("gaussian"), or a serialised one.

    Raises:
        ValueError: nothing is known by that name.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str):
        known = {cls.__name__.lower(): cls for cls in Mechanism.__subclasses__()}
        if identifier.lower() not in known:
            raise ValueError(f"noise={identifier!r} is not known; use one of {sorted(known)}.")
        identifier = known[identifier.lower()]()
    if not isinstance(identifier, Mechanism):
        raise ValueError(
            "noise must be a name such as 'gaussian' or a dp_keras_opt.noise.Mechanism; "
            f"received {identifier!r}."
        )
    return identifier
