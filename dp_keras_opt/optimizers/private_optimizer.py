"""What makes a Keras optimizer private: a mixin that all optimizers of this library share."""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt import _keras, deprecation
from dp_keras_opt import noise as noises
from dp_keras_opt.accounting.batch_sizes import BatchSizeLike, BatchSizes
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.clipping.quantile import Quantile
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.optimizers import clip_norms, filters, geometries, settings
from dp_keras_opt.optimizers import projection as projections
from dp_keras_opt.optimizers.clip_norms import ClipNormSchedule
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.settings import (
    FilterLike,
    NoiseLike,
    NoiseScheduleLike,
    Setting,
)
from dp_keras_opt.optimizers.sparse_embeddings import ByRow, SparseEmbeddings
from dp_keras_opt.optimizers.updates_once import UpdatesOnce
from dp_keras_opt.types import ClipNorm, ClippingStyle

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.noise.released import Released


class PrivateOptimizer(UpdatesOnce):
    """Mixin over `keras.optimizers.Optimizer`: what is asked of the data, and what comes back.

    A subclass inherits from this first and from a Keras optimizer second. Most write only
    `update_step`, the Keras way; one that needs another geometry or several statistics overrides
    `queries`, `releases_for` and `update`, which adds 1 to `_iterations` where it does not call
    that of this class.

    Args:
        *args: those of the Keras optimizer.
        {{private_arguments}}
        **kwargs: the others of the Keras optimizer.

    Raises:
        ValueError: an argument is out of range, or is one of Keras's that would mean something
            else here.
    """

    clip_norm = Setting(
        clip_norms.resolve,
        "C > 0, the bound on the norm of each example's gradient: L2 for Gaussian noise, L1 for "
        "Laplace noise. A Keras `LearningRateSchedule` where it changes with the step, which must "
        "not look at the data. A `clipping.Quantile` where it is to find itself, by noisy counts "
        "of how many examples are not clipped. `math.inf` only together with noise_multiplier=0, "
        "which gives no privacy.",
    )
    batch_size = Setting(
        settings.batch_size,
        "B, the expected batch size; the noisy sum is divided by it. A public constant, never the "
        "realised size. None for that of the data, which `fit` and `accounting.calibrate` take. "
        "`accounting.BatchSizes`, such as {0: 128, 500: 256}, where it changes.",
        later=True,
    )
    noise_multiplier = Setting(
        settings.noise_multiplier,
        "σ ≥ 0, the noise's standard deviation over C (Laplace: its scale over C; with a "
        "`clipping.Quantile` that of gradients and counts together). None for the "
        "least that keeps a `PrivacyBudget` given to `fit`, or that `accounting.calibrate` finds. "
        "0 trains without privacy, and the ledger says so.",
        later=True,
    )
    noise = Setting(
        lambda name, value: noises.get(value), "a mechanism of `dp_keras_opt.noise`, or its name."
    )
    noise_schedule = Setting(
        lambda name, value: noises.schedules.get(value),
        "factors α_t on σ that are fixed in advance: a list, or an object of "
        "`dp_keras_opt.noise.schedules`. None for constant noise.",
    )
    clipping = Setting(
        settings.clipping_style,
        '"flat", one norm over all variables; "per_layer", one for each layer, with bounds C/√L '
        "for L layers; or a dict from layer names to the proportions of their bounds C_l, where "
        "√ΣC_l² = C (for noise that is calibrated in L1: ΣC_l = C).",
    )
    normalize = Setting(
        settings.boolean,
        "False for clip(g; C) = g·min(1, C/‖g‖); True for g·C/(‖g‖ + 0.01), automatic clipping "
        "(Bu et al., NeurIPS 2023, arXiv:2206.07136).",
    )
    gradient_filter = Setting(
        lambda name, value: filters.get(value),
        "None, or an object of `dp_keras_opt.filters` or the name of a preset, which smooths the "
        "privatized gradients over time. The rule then steps along its output; second moments come "
        "from the unfiltered gradients. It takes the place of Adam's first moment.",
    )
    projection = Setting(
        lambda name, value: projections.get(value),
        "None, or an `optimizers.GaLore`: filter, moments and step live in low-dimensional "
        "subspaces of the weight matrices.",
    )
    geometry = Setting(
        lambda name, value: geometries.get(value),
        "None, or an object of `dp_keras_opt.geometries`: in what coordinates, and around what, "
        "examples are clipped.",
    )
    sparse_embeddings = Setting(
        settings.optional(SparseEmbeddings),
        "None, or an `optimizers.SparseEmbeddings`: in each step few rows of embedding tables get "
        "noise and are moved.",
    )
    secure_noise = Setting(
        settings.boolean,
        "whether the noise withstands attacks on floating-point numbers and on the random "
        "generator (`noise.secure`). Slower, and not for steps compiled by XLA.",
        at_once=True,
    )
    seed = Setting(
        settings.seed,
        "None, noise from the operating system's entropy. An integer makes the noise reproducible "
        "and voids the guarantee.",
        at_once=True,
    )

    #: Whether the rule can work in a subspace: it moves the variables by `_move` alone.
    takes_projection = False

    #: Whether all that is asked of private rows is one mean, so that it may have a geometry.
    takes_geometry = False

    #: Whether the rule moves each weight by what was released of it alone, so that it may be some.
    takes_sparse_embeddings = False

    #: Settings that follow from other arguments, and are no part of the configuration.
    _derived_settings: frozenset[str] = frozenset()

    #: Whether the optimizer needs public rows in each batch (`data.with_public`).
    needs_public = False

    #: Why no `clipping.Quantile` is taken as clip norm; None where one is.
    _no_quantile: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        settings.fill_docstring(cls)

    def __new__(cls, *args: Any, **kwargs: Any):
        # Here, because `__init__` is not reached where an argument is missing.
        settings.refuse_foreign_names(cls.__name__, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        *args: Any,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        projection: GaLore | None = None,
        geometry: Geometry | None = None,
        sparse_embeddings: SparseEmbeddings | None = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        settings.refuse_keras_arguments(type(self).__name__, kwargs)
        average_from = settings.average_from(kwargs)
        super().__init__(*args, **kwargs)
        self._average_from = average_from
        # What Keras must neither track nor save: a plain object, into which it does not look.
        self._untracked = types.SimpleNamespace(state=[], slots={}, by_row=None)
        self.clip_norm = clip_norm
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.noise = noise
        self.noise_schedule = noise_schedule
        self.clipping = clipping
        self.normalize = normalize
        self.gradient_filter = gradient_filter
        self.projection = projection
        self.geometry = geometry
        self.sparse_embeddings = sparse_embeddings
        self.secure_noise = secure_noise
        self.seed = seed
        if secure_noise and seed is not None:
            raise ValueError(
                "secure_noise=True and a seed contradict each other: whoever knows the seed can "
                "subtract the noise. Leave one of them out."
            )
        self._check_quantile()
        self._check_geometry()
        self._check_sparse_embeddings()
        self.noise_source = SecureNoiseSource() if secure_noise else NoiseSource(seed)

    def __setattr__(self, name: str, value: Any) -> None:
        # Some would have fewer steps counted than run.
        settings.refuse_keras_arguments(type(self).__name__, {name: value})
        if name == "noise_source" and name in vars(self):
            raise ValueError("Where the noise comes from is fixed. Make a new optimizer.")
        super().__setattr__(name, value)

    @property
    def average_from(self) -> int | None:
        """The step from which on the variables are averaged uniformly, or None."""
        return self._average_from

    def _update_model_variables_moving_average(self, trainable_variables):
        """Keras's average w̄ ← m·w̄ + (1 − m)·w, with m = k/(k + 1) where it is to be uniform."""
        if self.average_from is None:
            super()._update_model_variables_moving_average(trainable_variables)
            return
        averaged = ops.maximum(self.iterations - self.average_from, 0)  # k, before this step
        averages = self._model_variables_moving_average
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:
                share = 1 / (ops.cast(averaged, average.dtype) + 1)
                average.assign(average + share * (variable - average))

    @property
    def has_momentum(self) -> bool:
        """Whether the rule itself averages over time what it is given."""
        return False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        self._need_settled()
        self._check_quantile()
        self._check_geometry()
        self._check_sparse_embeddings()
        if self.projection is not None:
            self._check_projection()
            self.projection.select(variables)
        smooths = self.gradient_filter is not None and self.gradient_filter.smooths
        if smooths and self.has_momentum:
            warnings.warn(
                f"{type(self).__name__} has momentum and a gradient_filter: both smooth, and the "
                "step lags behind the gradient by their sum. Set one of them only.",
                stacklevel=2,
            )
        super().build(variables)
        if isinstance(self.clip_norm, Quantile):
            start = self.clip_norm.start(self._proportions(variables))
            # Past `self.add_variable`: it is no state of the rule, which a projection would reset.
            self._found_clip_norms = super().add_variable(
                (len(start),), keras.initializers.Constant(start), "float32", name="clip_norm"
            )
        self._remember_noise(variables)
        if self.projection is not None:
            self.projection.build(self)
        if self.gradient_filter is not None:
            self.gradient_filter.build(self, variables)
        if self.geometry is not None:
            self.geometry.build(self, variables)
        if self.sparse_embeddings is not None:
            self._build_tables(variables)

    @property
    def plan(self) -> Plan | None:
        """The `Plan` that the noise multiplier was found for, by `fit` or `accounting.calibrate`.

        None where it was given, or was set to another one since.
        """
        plan = getattr(self._untracked, "plan", None)
        return plan if plan and plan.noise_multiplier == self.noise_multiplier else None

    @plan.setter
    def plan(self, plan: Plan | None) -> None:
        self._untracked.plan = plan

    @property
    def calibrated_for(self) -> Sampling | None:
        """The `Sampling` of the plan; training on other data is refused."""
        return None if self.plan is None else self.plan.sampling

    @property
    def is_settled(self) -> bool:
        """Whether it knows its batch size, and for how many steps its noise is."""
        is_open = self.noise.is_open or self.noise_schedule.is_open
        return self.batch_size is not None and not is_open

    def settle(self, sampling: Sampling, steps: int) -> None:
        """Sets what was left open, for so many steps: batch size, noise and noise schedule."""
        if self.batch_size is None:
            self.batch_size = sampling.divisor
        if self.noise.is_open:
            self.noise = self.noise.for_run(steps, sampling, self.workload(steps))
            self._check_geometry()
        if self.noise_schedule.is_open:
            self.noise_schedule = self.noise_schedule.of_length(steps)

    def _rule(self) -> keras.optimizers.Optimizer:
        """The optimizer whose momentum and learning rate are in use: this one."""
        return self

    def workload(self, steps: int) -> noises.Workload:
        """How the weights add the gradients of so many steps up, as far as that is public.

        Adam's first moment counts as momentum; a second moment is not known beforehand. Decoupled
        weight decay at a constant learning rate has the weights forget. Clip norms and batch sizes
        that change make the noise of a step larger or smaller, as its learning rate does.
        """
        rule = self._rule()
        momentum = getattr(rule, "momentum", None)
        if momentum is None and self.gradient_filter is None:  # which takes beta_1's place
            momentum = getattr(rule, "beta_1", None)
        schedule, rates, horizon = _keras.schedule_of(rule), None, None
        if schedule is not None:
            rates = tuple(float(schedule(step)) for step in range(steps))
        elif rule.weight_decay:
            rate = float(ops.convert_to_numpy(rule.learning_rate))
            horizon = max(1.0, 1 / (rate * rule.weight_decay))
        is_nesterov = bool(getattr(rule, "nesterov", False))
        found = noises.Workload(momentum or 0.0, is_nesterov, rates, horizon)
        if isinstance(self.batch_size, BatchSizes):
            sizes = self.batch_size.sizes(0, steps)
            found = found.at_levels(self.batch_size.largest / sizes)
        if isinstance(self.clip_norm, ClipNormSchedule):
            bounds = self.clip_norm.values(0, steps)
            found = found.at_levels(bounds / bounds.max())
        return found

    def _need_settled(self) -> None:
        """Refuses to go on while something is left open.

        Raises:
            ValueError: the batch size is not set, or a part does not know for how many steps it is.
        """
        if self.batch_size is None:
            raise ValueError(
                "The optimizer's batch_size is not set. Pass it to the optimizer (the expected "
                "number of examples in a batch), or train with batches of dp_keras_opt.data, which "
                "know theirs."
            )
        for part in (self.noise, self.noise_schedule):
            if part.is_open:
                raise ValueError(
                    f"{type(part).__name__} does not know yet for how many steps it "
                    "is. fit settles that at its start, and so does calibrate; for anything else, "
                    "give it its steps."
                )

    def _remember_noise(self, variables):
        """Makes the memory of correlated noise, for each draw that a step takes."""
        if not self.noise.is_correlated:
            return
        size = sum(math.prod(v.shape) for v in variables)
        if isinstance(self.clip_norm, Quantile):
            size += self._num_counts
        buffers = self.noise.buffers(size, self.noise_source)
        for index, release in enumerate(self.releases_for(1.0)):
            if not release.is_public and release.multiplier:
                for part in range(2 if release.statistic == "mean_and_square" else 1):
                    self.noise_source.memory.allocate((index, part), buffers)

    def _check_quantile(self):
        """Refuses a `clipping.Quantile` where it does not go with the other settings."""
        name = type(self).__name__
        if self._no_quantile:
            clip_norms.refuse_quantile(self.clip_norm, name, self._no_quantile)
        if self.normalize:
            clip_norms.refuse_quantile(
                self.clip_norm,
                f"{name} with normalize=True",
                "every gradient is scaled to C, so that C and the learning rate count as a product "
                "only, and there is nothing to find",
            )
        if not isinstance(self.noise, noises.Gaussian | noises.Correlated | noises.Planned):
            clip_norms.refuse_quantile(
                self.clip_norm,
                f"{name} with noise={type(self.noise).__name__}",
                "gradients and counts are one release under Gaussian noise, independent or "
                "correlated, and not under any other",
            )

    def _proportions(self, variables):
        """Those of the bounds C_l, in the order of `clipping.clip_groups`."""
        if isinstance(self.clipping, Mapping):
            return list(self.clipping.values())
        # Of the model that they belong to nothing is known here: a layer is where its variables
        # are. `clip_groups` refuses models of another number of layers.
        layers = {variable.path.rpartition("/")[0] for variable in variables}
        return [1.0] * (len(layers) if self.clipping == "per_layer" else 1)

    def _check_projection(self):
        """Refuses a projection where the rule does not work in a subspace."""
        if not self.takes_projection:
            raise ValueError(
                f"{type(self).__name__} does not take a projection. DPSGD, DPAdam, DPAdagrad, "
                "DPRMSprop and DPYogi do."
            )

    def _check_geometry(self):
        """Refuses a geometry beside what has one of its own, or needs noise of one size."""
        if self.geometry is None:
            return
        name = type(self.geometry).__name__
        if not self.takes_geometry:
            raise ValueError(
                f"{type(self).__name__} does not take geometry={name}: it clips in a geometry of "
                "its own, or asks for more than one mean of the private rows. DPSGD, DPAdam, "
                "DPAdagrad, DPRMSprop, DPYogi, DPHeavyBall, DPNesterov, DPMuon and DPOptimizer do."
            )
        if self.projection is not None:
            raise ValueError(
                f"geometry={name} makes noise of other sizes in other directions, and a projection "
                "would take the noisiest for those of the gradient. Leave one of them out."
            )
        if self.noise.is_correlated and not self.geometry.takes_correlated_noise:
            raise ValueError(
                f"geometry={name} does not go with noise={_named(self.noise)}: what the noise of "
                "earlier steps takes off that of this one depends on bounds that change from step "
                "to step, so that bounds would feed on the noise. Leave noise out, or take "
                "geometries.Mean()."
            )

    def _check_sparse_embeddings(self):
        """Refuses tables of which few rows are moved beside what needs all of them."""
        if self.sparse_embeddings is None:
            return
        if not self.takes_sparse_embeddings:
            raise ValueError(
                f"{type(self).__name__} does not take sparse_embeddings: its step of a weight "
                "depends on more than what was released of it. DPSGD, DPAdam, DPAdagrad, DPRMSprop "
                "and DPYogi do."
            )
        reasons = {
            "noise": "the noise of each step must be independent of that of the steps before, at "
            "which other rows were chosen, and Gaussian, as the counts have it"
            if type(self.noise) is not noises.Gaussian
            else None,
            "clip_norm": "a clip norm that finds itself is not proved beside counts of rows"
            if isinstance(self.clip_norm, Quantile)
            else None,
            "gradient_filter": "it filters gradients of equal steps, and each row has its own",
            "projection": "its subspaces are of whole tables",
            "geometry": "it is learned from whole gradients",
            "weight_decay": "it moves all rows of a table in each step"
            if self.weight_decay
            else None,
        }
        for name, reason in reasons.items():
            value = getattr(self, name)
            if value is not None and reason is not None:
                raise ValueError(
                    f"sparse_embeddings does not go with {name}={_named(value)}: {reason}. Leave "
                    "one of them out."
                )

    def _build_tables(self, variables):
        """Finds the tables, and makes what is remembered of their rows."""
        tables = self._untracked.tables = self.sparse_embeddings.tables(variables)
        chosen = {index: variables[index] for index in tables.trained}
        for table in chosen.values():
            if table.regularizer is not None or table.constraint is not None:
                raise ValueError(
                    f"{table.path} has a regularizer or a constraint, which moves all of its rows "
                    "in each step. Leave it out, or the table out of SparseEmbeddings(layers=...)."
                )
        steps = {
            index: self.add_variable((table.shape[0], 1), dtype="int32", name=f"steps_{index}")
            for index, table in chosen.items()
        }
        slots = {index: self._untracked.slots.get(id(table), []) for index, table in chosen.items()}
        self._untracked.by_row = ByRow(chosen, slots, steps)

    @property
    def refuses_xla(self) -> str | None:
        """Why XLA cannot compile its steps; None where it can."""
        if self.secure_noise:
            return "secure_noise=True takes its random bits from outside of the graph"
        if self.sparse_embeddings is not None:
            return "sparse_embeddings chooses rows of a number that is not known beforehand"
        return None

    def begin(self, model: keras.Model) -> None:
        """Before the first step of a model that it was built for."""
        if self.geometry is not None:
            self.geometry.begin(self, model)

    def add_variable(
        self, shape: Sequence[int], initializer: Any = "zeros", *args: Any, **kwargs: Any
    ) -> keras.Variable:
        """Keras's; what is added once the rule is built is state that `_reset_state` resets."""
        variable = super().add_variable(shape, initializer, *args, **kwargs)
        if self.built:  # before that, Keras adds its moving averages
            self._untracked.state.append((variable, initializer))
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        """Keras's; where there is a projection, the rule's state is of the subspace."""
        shape = None
        if self.built and self.projection is not None:
            shape = self.projection.shape_of(reference_variable)
        if shape is None:
            variable = super().add_variable_from_reference(reference_variable, name, initializer)
            if self.built:
                self._untracked.slots.setdefault(id(reference_variable), []).append(variable)
            return variable
        name = f"{reference_variable.path.replace('/', '_')}_{name}"
        return self.add_variable(shape, initializer, dtype=reference_variable.dtype, name=name)

    def ensure_built(self, variables: Sequence[keras.Variable]) -> None:
        """Builds the optimizer for these variables, or checks that it was built for them.

        Raises:
            ValueError: it was built for others: statistics and variables would be mixed up.
        """
        if not self.built:
            self.build(variables)
        if [id(v) for v in self._trainable_variables] != [id(v) for v in variables]:
            raise ValueError(
                f"This {type(self).__name__} was built for other variables: it served another "
                "model, or layers were frozen or unfrozen since. Compile with a new optimizer."
            )

    # What is asked of the data.

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuses a `Sampling` for which sensitivity or noise would not be as accounted."""
        self.noise.check_sampling(sampling)
        chooses_points = self.gradient_filter is not None and self.gradient_filter.chooses_points
        if chooses_points and sampling.rows_per_unit is not None:
            raise ValueError(
                f"{type(self.gradient_filter).__name__} takes gradients at other points than the "
                "weights, which is not proved for several rows (of a user, or views of one row) "
                "that are clipped as one. Use another gradient_filter, or clip rows one by one."
            )

    def prepare(self, variables: Sequence[keras.Variable]) -> None:
        """Moves the variables to the point where the gradient is taken, and sets state that a step
        begins with; idempotent. Here there is nothing to do."""

    def query(
        self, scale: Sequence[tf.Tensor] | None = None, clip_norm: float | tf.Tensor | None = None
    ) -> Query:
        """A query with this optimizer's bound and style, in the geometry `scale`.

        Of one that is not built yet a clip norm that finds itself is a number, and there are no
        counts.
        """
        if scale is not None:  # clipping works in float32, whatever the variables are
            scale = [tf.cast(part, tf.float32) for part in scale]
        points = None
        if self.built and self.gradient_filter is not None:
            points = self.gradient_filter.points(self)
        counts = isinstance(self.clip_norm, Quantile) and clip_norm is None and self.built
        if counts:
            clip_norm = tf.convert_to_tensor(self._found_clip_norms)
        elif clip_norm is None:
            clip_norm = self.current_clip_norm
        query = Query(
            scale, clip_norm, self.noise.norm, self.clipping, self.normalize, counts=counts,
            points=points, tables=getattr(self._untracked, "tables", None),
        )  # fmt: skip
        return query if self.geometry is None or not self.built else self.geometry.seen(self, query)

    def queries(self) -> tuple[Query, ...]:
        """The tuple of `Query` of this step, known before the data is touched; changes nothing."""
        return (self.query(),)

    @property
    def expected_batch_size(self) -> int | tf.Tensor:
        """B of this step: a number; where it changes, a float32 scalar."""
        if not isinstance(self.batch_size, BatchSizes):
            return self.batch_size
        firsts, sizes = zip(*self.batch_size.stages, strict=True)
        begun = ops.count_nonzero(ops.cast(self.iterations, "int64") >= ops.array(firsts, "int64"))
        return ops.take(ops.array(sizes, "float32"), begun - 1)

    @property
    def current_clip_norm(self) -> float | tf.Tensor:
        """C of this step: a number; where it changes, a float32 scalar."""
        if isinstance(self.clip_norm, Quantile):
            return ops.norm(self._found_clip_norms) if self.built else self.clip_norm.initial
        return clip_norms.at(self.clip_norm, self.iterations)

    @property
    def _clip_norms(self):
        """All bounds that `queries` uses."""
        return (self.clip_norm,)

    def check_clip_norms(self, start: int, steps: int) -> None:
        """Refuses bounds that are none at one of the steps from `start` on.

        Raises:
            ValueError: naming the first such step.
        """
        for bound in self._clip_norms:
            if isinstance(bound, ClipNormSchedule):
                bound.check(start, steps)

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        """The static tuple of `Release` of every step, at this overall noise multiplier."""
        return (self.mean_release(noise_multiplier), *self._public_releases())

    def _public_releases(self):
        """So that the privacy statement says what was declared public for a geometry."""
        if self.geometry is None or not self.geometry.uses_public:
            return ()
        return (Release(0, "public_values", 0.0, self.noise),)

    def mean_release(self, noise_multiplier: float) -> Release:
        """The release of what `queries` asks first: the mean, and what is counted beside it."""
        if self.sparse_embeddings is not None:
            selection = self.sparse_embeddings.selection
            return Release(0, "mean_of_rows", noise_multiplier, self.noise, rows=selection)
        if not isinstance(self.clip_norm, Quantile):
            return Release(0, "mean", noise_multiplier, self.noise)
        size = self.batch_size
        smallest = size.smallest if isinstance(size, BatchSizes) else size
        on_counts = self.clip_norm.noise_on_counts(smallest)
        return Release(0, "mean_and_counts", noise_multiplier, self.noise, count_noise=on_counts)

    @property
    def releases(self) -> tuple[Release, ...]:
        """What every step publishes: draws the noise and yields the accountant's event.

        Raises:
            ValueError: noise multiplier or batch size is not set, or the clip norm gives no bound;
                or the counts of a `clipping.Quantile` have too little noise.
        """
        if self.noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is not set. Pass it, find it with "
                "dp_keras_opt.accounting.calibrate(optimizer, batches, epochs=..., epsilon=..., "
                "delta=...), or train by fit with a PrivacyBudget, which finds it."
            )
        self._need_settled()
        unbounded = math.inf in self._clip_norms
        if unbounded and (self.noise_multiplier > 0 or self.normalize):
            raise ValueError(
                "An infinite clip_norm bounds nothing and allows only noise_multiplier=0 without "
                "normalize, which trains without privacy."
            )
        releases = self.releases_for(self.noise_multiplier)
        if isinstance(self.clip_norm, Quantile):
            self._check_counts(releases)
        return releases

    def _check_counts(self, releases):
        """Refuses more than one release of mean and counts, and noise that is not enough for it."""
        private = [release for release in releases if not release.is_public]
        if [release.statistic for release in private] != ["mean_and_counts"]:
            raise ValueError(
                f"{type(self).__name__} releases more than one clipped mean of each batch, or "
                f"another one than its first: clip_norm={self.clip_norm} would count for one of "
                "them only. Give one clip_norm."
            )
        private[0].noise_on_sum(self._num_counts)

    @property
    def _num_counts(self):
        """How many counts a step releases; before the layers are known, at least so many."""
        if self.built:
            return self._found_clip_norms.shape[0]
        return len(self.clipping) if isinstance(self.clipping, Mapping) else 1

    @property
    def noise_on_sum(self) -> float | None:
        """The noise's std over C; above `noise_multiplier` where counts have their part of it."""
        if self.noise_multiplier is None:
            return None
        if self.sparse_embeddings is not None:
            return self.sparse_embeddings.selection.multipliers(self.noise_multiplier)[1]
        if not isinstance(self.clip_norm, Quantile):
            return self.noise_multiplier
        return self.mean_release(self.noise_multiplier).noise_on_sum(self._num_counts)

    # What is done with the answers: post-processing.

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        """v̂ of each variable before any floor, from released values; empty for rules without v."""
        return []

    def update(self, released: Sequence[Released]) -> None:
        """Updates the variables from the privatized statistics.

        Args:
            released: the list of `noise.Released` that `noise.release` gave for `releases`.
        """
        answer = self._answer(released)
        self._apply(self._regularized(answer.value), answer.noise_std)

    def _answer(self, released):
        """The mean in the coordinates of the gradient, of which the geometry learns."""
        answer = released[0].unscaled()
        if self.geometry is not None:
            self.geometry.update(self, released[0], answer)
        by_row = self._untracked.by_row
        return answer if by_row is None else by_row.take(answer)

    def adapt_clip_norm(self, released: Sequence[Released]) -> None:
        """Moves a clip norm that finds itself, after the update of a step, by the counts of it.

        Args:
            released: as for `update`.
        """
        if isinstance(self.clip_norm, Quantile):
            found = tf.convert_to_tensor(self._found_clip_norms)
            shares = tf.cast(released[0].shares, found.dtype)
            self.assign(self._found_clip_norms, self.clip_norm.next(found, shares))

    def _apply(self, gradients, noise_std):
        """Project → filter → Keras's own `apply`: weight decay, `update_step`, EMA.

        Args:
            gradients: privatized gradients, in the geometry of 1.
            noise_std: std of the noise in their coordinates; a scalar, or a list of one tensor per
                variable.
        """
        self._step(self._filtered(self._projected(gradients), noise_std))

    def _step(self, gradients):
        """Keras's own `apply`; that of this class refuses raw gradients."""
        super().apply(gradients, self._trainable_variables)
        if self._untracked.by_row is not None:
            self._untracked.by_row.finish()

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        with self._on_rows():
            super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _on_rows(self):
        """The scope in which the rule sees of tables the chosen rows alone."""
        by_row = self._untracked.by_row
        return contextlib.nullcontext() if by_row is None else by_row.of()

    def assign(self, variable: Any, value: Any) -> None:
        """Keras's; to the chosen rows, where `variable` is of a table."""
        self._assign(super().assign, variable, value, lambda old, new: new)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Keras's; to the chosen rows, where `variable` is of a table."""
        self._assign(super().assign_add, variable, value, lambda old, new: old + new)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Keras's; to the chosen rows, where `variable` is of a table."""
        self._assign(super().assign_sub, variable, value, lambda old, new: old - new)

    def _assign(self, by_keras, variable, value, function):
        by_row = self._untracked.by_row
        if by_row is None or not by_row.holds(variable):
            by_keras(variable, value)
        else:
            by_row.assign(variable, lambda old: function(old, ops.cast(value, old.dtype)))

    def _projected(self, gradients):
        """Gradients where the rule works: in a subspace, if it does; in a new one where due."""
        if self.projection is None:
            return gradients
        gradients = self.projection.project(self, gradients)
        if self.projection.reset:
            changed = self.projection.is_due(self.iterations)
            tf.cond(changed, lambda: self._reset_state(self.projection.bases), lambda: None)
        return gradients

    def _filtered(self, gradients, noise_std):
        if self.gradient_filter is None:
            return gradients
        stds = noise_std if isinstance(noise_std, list) else [noise_std] * len(gradients)
        power = tf.add_n(
            [
                tf.reduce_sum(tf.square(tf.cast(std, tf.float32)) + tf.zeros(g.shape))
                for std, g in zip(stds, gradients, strict=True)
            ]
        )
        return self.gradient_filter(self, gradients, power)

    def _move(self, variable, step):
        """w ← w − step, the step lifted out of the subspace where the rule works in one."""
        if self.projection is not None:
            index = self._get_variable_index(variable)
            step = self.projection.lift(index, step, variable.shape)
        self.assign_sub(variable, step)

    def to_subspace(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Gradients where the rule works now: projected, if it works in a subspace."""
        if self.projection is None:
            return gradients
        return [self.projection.reduce(index, g) for index, g in enumerate(gradients)]

    def _steps_in_moments(self, done):
        """How many of the `done` steps the moments hold: all, unless a projection resets them."""
        if self.projection is None or not self.projection.reset:
            return done
        gap = self.projection.update_gap
        return ops.where(done > 0, (done - 1) % gap + 1, 0)

    def _reset_state(self, keep):
        """Sets the rule's state to where it started, except the variables `keep`."""
        kept = {id(variable) for variable in keep}
        for variable, initializer in self._untracked.state:
            if id(variable) not in kept:
                start = keras.initializers.get(initializer)
                self.assign(variable, start(variable.shape, dtype=variable.dtype))

    def _regularized(self, gradients):
        """Adds the gradients of the variables' regularisers, which do not depend on the data.

        Args:
            gradients: privatized gradients, in the geometry of 1.
        """
        variables = [v for v in self._trainable_variables if v.regularizer is not None]
        if not variables:
            return gradients
        values = [tf.convert_to_tensor(v) for v in variables]
        with tf.GradientTape() as tape:
            tape.watch(values)
            pairs = zip(variables, values, strict=True)
            penalty = tf.add_n([tf.reduce_sum(v.regularizer(value)) for v, value in pairs])
        extra = tape.gradient(penalty, values)
        extra = {id(v): g for v, g in zip(variables, extra, strict=True) if g is not None}
        return [
            g + tf.convert_to_tensor(extra[id(v)]) if id(v) in extra else g
            for g, v in zip(gradients, self._trainable_variables, strict=True)
        ]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refused: these would be raw gradients.

        Raises:
            RuntimeError: always. Only `DPModel` clips and adds noise.
        """
        raise RuntimeError(
            f"{type(self).__name__} was given a raw batch gradient, which is neither clipped per "
            "example nor noised: the training would not be private. Train a "
            "dp_keras_opt.DPModel, or wrap the model: dp_keras_opt.make_private(model)."
        )

    # Saving and loading.

    def load_own_variables(self, store: Any) -> None:
        """Restores the optimizer's state; one that is not built yet starts afresh, with a warning.

        Raises:
            ValueError: it is built, and the state does not fit. (Keras would restart at step 0.)
        """
        if len(store.keys()) != len(self.variables):
            if not self.built:
                warnings.warn(
                    f"{type(self).__name__} is not built yet and starts afresh: the saved state of "
                    "the optimizer is not restored. To go on where it stopped, load the whole "
                    "model, or call optimizer.build(model.trainable_variables) before.",
                    stacklevel=2,
                )
                return
            raise ValueError(
                f"The saved state has {len(store.keys())} variables and {type(self).__name__} has "
                f"{len(self.variables)}: it belongs to another optimizer or another model. To "
                "start afresh, load_model(..., compile=False) and compile with a new optimizer; or "
                "load_weights before compile."
            )
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in settings.REFUSED:
            config.pop(name, None)
        if self.average_from is not None:
            config |= {"use_ema": False, "average_from": self.average_from}
        config |= self.private_config()
        return config if self.plan is None else config | {"plan": self.plan.get_config()}

    def private_config(self) -> dict[str, Any]:
        """The part of the configuration that bears on privacy."""
        own = settings.settings_of(type(self)).keys() - self._derived_settings
        return {name: self._serialized(name) for name in sorted(own)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> PrivateOptimizer:
        config = dict(config)
        plan = config.pop("plan", None)
        optimizer = super().from_config(config, custom_objects)
        if plan is not None:
            optimizer.plan = Plan.from_config(plan)
        return optimizer

    def _serialized(self, name):
        value = getattr(self, name)
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, BatchSizes):
            return [list(stage) for stage in value.stages]
        if isinstance(value, ClipNormSchedule):
            return value.get_config()
        plain = value is None or isinstance(value, bool | int | float | str | dict)
        return value if plain else keras.saving.serialize_keras_object(value)

    # Names of before.

    __getattr__ = deprecation.unlisted_attributes(
        calibration="plan",
        smooths="has_momentum",
        serve="ensure_built",
        forget="_reset_state",
        check_projection="_check_projection",
    )

    def in_subspace(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        """Deprecated: use `to_subspace`."""
        deprecation.warn(f"{type(self).__name__}.in_subspace", "to_subspace")
        return gradient if self.projection is None else self.projection.reduce(index, gradient)


def _named(value):
    return value if isinstance(value, int | float | str) else type(value).__name__


settings.fill_docstring(PrivateOptimizer)
