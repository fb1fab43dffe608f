"""The loss as a law of size and data, L(N, D) = E + A/N^alpha + B/D^beta, and the optimum it
implies at given FLOPs.

Legend: K laws, P points. Laws are rows theta = (ln E, ln A, ln B, alpha,
beta), so that all is evaluated in log space: A and B span many orders of magnitude. Source:
Hoffmann et al. 2022, sections 3.3 and D.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain.scaling.points import Array

NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Law:
    """One law with its five numbers."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def theta(self) -> Array:
        """The law as a row of logarithms and exponents."""
        with np.errstate(divide="ignore"):  # E = 0, no floor, is a law too
            return np.array([*np.log([self.E, self.A, self.B]), self.alpha, self.beta])

    @classmethod
    def from_theta(cls, theta: Array) -> Law:
        """The inverse of `theta`."""
        return cls(*(float(value) for value in (*np.exp(theta[:3]), theta[3], theta[4])))

    def loss(self, parameters: float | Array, tokens: float | Array) -> Array:
        """L(N, D) in nats per token."""
        return np.exp(log_loss(self.theta, np.log(parameters), np.log(tokens)))


@dataclass(frozen=True)
class FlopsLaw:
    """Training FLOPs per token as a power of the size, C/D = scale * N^power; the common 6ND has
    scale 6 and power 1.

    Attention and the output layer make real models differ from 6N (Transformer-XL by 0.65x to
    2.4x), by a factor that changes slowly with the size: a power law over the fitted sizes is
    accurate to a few percent and keeps closed forms.
    """

    scale: float = 6.0
    power: float = 1.0
    largest_error: float = 0.0  # of ln(C/D) over the points it was fitted to

    def log_tokens(self, log_flops: Array, log_parameters: Array) -> Array:
        """ln D of a run of size N that costs C."""
        return log_flops - np.log(self.scale) - self.power * log_parameters

    def log_flops(self, log_parameters: Array, log_tokens: Array) -> Array:
        """ln C of a run of size N over D tokens."""
        return np.log(self.scale) + self.power * log_parameters + log_tokens


def fit_flops_law(parameters_P: Array, tokens_P: Array, flops_P: Array) -> FlopsLaw:
    """FLOPs per token as a power of the size; exactly 6N if these runs have 6N to 1e-6."""
    log_ratio_P = np.log(flops_P / tokens_P)
    n_P = np.log(parameters_P)
    if np.allclose(log_ratio_P, np.log(6) + n_P, rtol=0, atol=1e-6):
        return FlopsLaw()
    if np.ptp(n_P) < 1e-9:
        return FlopsLaw(scale=float(np.exp(np.mean(log_ratio_P - n_P))))
    power, log_scale = np.polyfit(n_P, log_ratio_P, 1)
    error = np.abs(log_scale + power * n_P - log_ratio_P).max()
    return FlopsLaw(scale=float(np.exp(log_scale)), power=float(power), largest_error=float(error))


def log_terms(theta: Array, n_P: Array, d_P: Array) -> Array:
    """The logarithms of the three terms, [..., 3, P]."""
    e, a, b, alpha, beta = (theta[..., index, None] for index in range(5))
    shape = np.broadcast_shapes((e + n_P).shape, (e + d_P).shape)
    return np.stack([np.broadcast_to(e, shape), a - alpha * n_P, b - beta * d_P], axis=-2)


def log_loss(theta: Array, log_parameters: float | Array, log_tokens: float | Array) -> Array:
    """ln L for laws theta [..., 5] at points [P]; a single law and a single point give a scalar."""
    n_P, d_P = np.atleast_1d(log_parameters), np.atleast_1d(log_tokens)
    terms = log_terms(theta, n_P, d_P)
    peak = terms.max(axis=-2)
    value = peak + np.log(np.exp(terms - peak[..., None, :]).sum(axis=-2))
    return value[..., 0] if np.ndim(log_parameters) == np.ndim(log_tokens) == 0 else value


def loss_at(theta: Array, log_parameters: Array, log_tokens: Array) -> Array:
    """L of laws theta [..., 5], each at a size and tokens of its own [...]."""
    return np.exp(log_loss(theta, log_parameters[..., None], log_tokens[..., None])[..., 0])


def exponents(theta: Array, flops_law: FlopsLaw) -> tuple[Array, Array]:
    """The powers a, b of C in N* ~ C^a and D* ~ C^b."""
    alpha, beta = theta[..., 3], theta[..., 4]
    power = beta / (alpha + flops_law.power * beta)
    return power, 1 - flops_law.power * power


def log_optimum(theta: Array, log_flops: float | Array, flops_law: FlopsLaw) -> tuple[Array, Array]:
    """(ln N*, ln D*) that minimize the loss at C FLOPs, in closed form.

    With C = s N^p D the loss on the line is E + A N^-alpha + B (C/s)^-beta N^(p beta), least where
    N^(alpha + p beta) = alpha A / (p beta B) (C/s)^beta; s = 6, p = 1 is equation 4 of Hoffmann et
    al. 2022.
    """
    _, a, b, alpha, beta = (theta[..., index] for index in range(5))
    with np.errstate(
        invalid="ignore", divide="ignore"
    ):  # a law without a term has its optimum at 0 or infinity
        scaled = np.log(alpha) + a - np.log(flops_law.power * beta) - b
    n = (scaled + beta * (log_flops - np.log(flops_law.scale))) / (alpha + flops_law.power * beta)
    return n, flops_law.log_tokens(np.asarray(log_flops), n)
