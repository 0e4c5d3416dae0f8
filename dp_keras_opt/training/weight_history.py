"""What the weights of one model have cost, whoever trained them: their ledgers and checksums."""

import json

import numpy as np

from dp_keras_opt import checksums, provenance
from dp_keras_opt.accounting import Ledger

#: Of the ledger, among the arrays of a saved model.
_KEY = "privacy_ledger"


class WeightHistory:
    """Brings together the ledger of a model and what else is known of its weights.

    A variable may be in several models, and weights are loaded, copied and assigned
    (`provenance`, `checksums`).

    Attributes:
        learned: whether loaded weights have brought a ledger.
    """

    def __init__(self):
        self.learned = False
        self._unreadable = None  # why the ledger of loaded weights could not be read
        self._others = (None, ())  # ledgers of shared weights, as of which record
        self._recorded = None  # (the run that shapes the weights, whether a step of it ran)
        self._moving_since = None  # the registration of checksums before the steps of now

    def gather(self, ledger, weights):
        """Adds to the ledger what other models have spent on weights that this one shares.

        Raises:
            ValueError: weights were loaded whose ledger could not be read.
        """
        if self._unreadable is not None:
            raise ValueError(
                "Weights were loaded into this model whose privacy ledger could not be read, so "
                "what they cost is not known. Load into a new model."
            ) from self._unreadable
        others = [each for each in provenance.ledgers_of(weights) if each is not ledger]
        self._others = provenance.last_record(), others
        self._absorb(ledger)

    def gather_again(self, ledger, weights):
        """`gather`, in no time where nothing was recorded since."""
        if self._others[0] == provenance.last_record():  # walking the weights takes a millisecond
            self._absorb(ledger)
        else:
            self.gather(ledger, weights)

    def _absorb(self, ledger):
        for other in self._others[1]:
            ledger.absorb(other)

    def record(self, ledger, run, model, has_run):
        """Notes that the steps of a run, in this ledger, move the weights of the model.

        Args:
            ledger: the `Ledger`.
            run: the name of the run.
            model: whose weights.
            has_run: whether a step of it has run: then all weights are there.
        """
        if self._recorded not in ((run, has_run), (run, True)):
            provenance.record(provenance.moved_by(model), ledger)
            self._recorded = run, has_run

    def let_move(self, weights):
        """Before private steps: notes what others did until now, and expects no values any more."""
        if self._moving_since != checksums.last_registration():
            checksums.are_changed(weights)
            checksums.forget(weights)
            self._moving_since = checksums.last_registration()

    def learn(self, ledger, weights, text):
        """Takes what the ledger saved beside the weights says (`saved`).

        Raises:
            ValueError: it cannot be read or merged.
        """
        try:
            ledger.merge(Ledger.from_json(text))
        except ValueError as error:  # which Keras swallows with skip_mismatch=True
            self._unreadable = error
            raise
        provenance.record(weights, ledger)
        checksums.from_config(weights, json.loads(text).get("weights", ()))
        self.learned = True


def saved(ledger, weights, rewritten):
    """The ledger as text, with the checksums of the weights that it speaks of.

    Args:
        ledger: the `Ledger`.
        weights: the variables.
        rewritten: those of them that are not saved as they are.
    """
    entries = {"weights": checksums.to_config(weights, rewritten)}
    return json.dumps(json.loads(ledger.to_json()) | entries, indent=1)


def put(store, text):
    """Puts the text of a ledger among the arrays of a store."""
    store[_KEY] = np.frombuffer(text.encode(), np.uint8)


def taken(store):
    """(the arrays of a store, the text of the ledger among them or None)."""
    own = {key: np.array(store[key]) for key in list(store.keys())}
    text = own.pop(_KEY, None)
    return own, None if text is None else text.astype(np.uint8).tobytes().decode()
