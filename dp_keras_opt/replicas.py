"""What training on several devices or machines may raise."""

from dp_keras_opt.workers import WorkerLostError

__all__ = ["WorkerLostError"]
