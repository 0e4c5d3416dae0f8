"""This library: DP-SGD, and adaptive optimizers by where their second moment comes from."""

import keras
import tensorflow as tf
from workloads import WORKLOADS

import dp_keras_opt as dp
from workers.keras_common import fit_steps, inputs_and_outputs, optimizer_megabytes
from workers.protocol import serve
from workers.tensorflow_devices import peak_megabytes, strategy

MOST_STEPS = 2000

#: What came after the five papers, by the option that adds it to an optimizer.
LATER = {
    "disk": lambda spec: {"gradient_filter": dp.filters.DiSK(gamma=None)},
    "disk2": lambda spec: {"gradient_filter": dp.filters.DiSK()},
    "fftkf": lambda spec: {"gradient_filter": dp.filters.FFTKF(gamma=None)},
    "momenta": lambda spec: {"gradient_filter": dp.filters.PerExampleMomentum(2)},
    "sharpness": lambda spec: {"gradient_filter": dp.filters.SharpnessAware(0.1)},
    "mean": lambda spec: {"geometry": dp.geometries.Mean()},
    "adaclip": lambda spec: {"geometry": dp.geometries.AdaClip()},
    "geoclip": lambda spec: {"geometry": dp.geometries.GeoClip(8)},
    "kronecker": lambda spec: {"geometry": dp.geometries.KroneckerFactored(spec.batch(64))},
}


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`.

    Variants: "dpsgd", "dp2rmsprop", "galore", the second moments of DPAdam; after them "+xla" to
    compile the step on the CPU too, "+pieces" for physical batches of 256, "+bands16" for noise of
    16 bands, "+secure" for secure noise, "+two" for two devices, or "+" and the name of a filter or
    one of `LATER`; and "muon", which takes of these but "+corrected".
    """
    variant, *options = variant.split("+")
    spec = WORKLOADS[workload]
    by_xla = device == "gpu" and not {"two", "secure"} & set(options)
    with strategy(device, 2 if "two" in options else 1).scope():
        model = dp.DPModel(*inputs_and_outputs(keras, workload, spec))
        model.compile(
            optimizer(variant, batch_size, options, spec),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile="xla" in options or by_xla,
            physical_batch_size=256 if "pieces" in options else None,
        )
    data = tf.data.Dataset.from_tensors(spec.batch(batch_size)).repeat()
    sampling = dp.accounting.Sampling.full(batch_size)
    if "bands16" in options:  # which needs an example's steps to be as far apart
        sampling = dp.accounting.Sampling.cyclic_poisson(16 * batch_size, batch_size, groups=16)
    data = dp.data.assume_sampling(data, sampling)
    return fit_steps(keras, model, data), model.count_params(), optimizer_megabytes(model)


def optimizer(variant, batch_size, options, spec):
    """The optimizer of a variant, with clip norm 1 and noise multiplier 1."""
    common = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": batch_size}
    common["secure_noise"] = "secure" in options
    if "bands16" in options:
        common["noise"] = dp.noise.BandedMatrix(MOST_STEPS, 16)
    for option in options:
        if option in dp.filters.PRESETS:
            common["gradient_filter"] = option
        elif option in LATER:
            common |= LATER[option](spec)
    if variant == "dpsgd":
        return dp.optimizers.DPSGD(0.01, **common)
    if variant == "dp2rmsprop":  # one step of its SGD phase, then adaptive ones only
        return dp.optimizers.DP2RMSprop(
            0.01, 0.01, epsilon=1e-3, delay=(1, 10**6), adaptive_clip_norm=1.0, **common
        )
    if variant == "galore":  # beyond its first step, which finds the subspace
        return dp.optimizers.DPGaLore(0.001, rank=32, update_gap=10**6, epsilon=1e-3, **common)
    if variant == "muon":
        return dp.optimizers.DPMuon(0.001, bias_correction="corrected" in options, **common)
    return dp.optimizers.DPAdam(0.001, epsilon=1e-3, second_moment=variant, **common)


if __name__ == "__main__":
    serve(prepare, ("tensorflow", "keras"), peak_megabytes)
