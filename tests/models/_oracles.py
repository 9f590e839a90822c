"""Plain NumPy float64 twins of the frugal models' parts, in loops where a loop is plainer."""

from __future__ import annotations

import math

import jax
import numpy as np


def float64(tree):
    """A tree of arrays as NumPy float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)


def softmax(x):
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def spectral_linear(params, direction, x, train=False):
    """Output and new direction."""
    kernel, u = params["kernel"], direction
    if train:
        v = kernel @ u / np.linalg.norm(kernel @ u)
        u = kernel.T @ v / np.linalg.norm(kernel.T @ v)
    return x @ kernel / np.linalg.norm(kernel @ u) + params.get("bias", 0), u


def batch_norm(params, moving, x, filled, train=False):
    """Output and new running statistics of ``[B, W, C]``."""
    mean, variance = moving["mean"], moving["variance"]
    if train:
        seen = x[filled].reshape(-1, x.shape[-1])
        mean, variance = seen.mean(axis=0), seen.var(axis=0)
        moving = {
            "mean": 0.9 * moving["mean"] + 0.1 * mean,
            "variance": 0.9 * moving["variance"] + 0.1 * seen.var(axis=0, ddof=1),
        }
    return params["scale"] * (x - mean) / np.sqrt(variance + 1e-5) + params["bias"], moving


def block(params, direction, x, train=False):
    inner, direction = spectral_linear(params["linear"], direction, gelu(x), train)
    return sigmoid(params["a"]) * inner + sigmoid(params["b"]) * x, direction


def attend(params, moving, parts, train=False):
    """Label vectors and new directions; a part may be None."""
    present = [part is not None for part in parts]
    shape = next(part.shape for part in parts if part is not None)
    full = [np.zeros(shape) if part is None else part for part in parts]
    mixed, mix = spectral_linear(
        params["mix"], moving["mix"], np.maximum(np.stack(full, axis=1), 0), train
    )
    mixed[:, ~np.array(present)] = 0
    logits, score = spectral_linear(
        params["score"], moving["score"], mixed.reshape(len(mixed), -1), train
    )
    logits[:, ~np.array(present)] = -np.inf
    alpha = softmax(logits)
    vectors = sum(alpha[:, [k]] * part for k, part in enumerate(full))
    return vectors, {"mix": mix, "score": score}


def tfidf(texts, idf):
    """Rows of the TF-IDF matrix, ``[B, V]``, normalised; zeros where nothing is."""
    rows = np.zeros((len(texts), len(idf)))
    for row, text in zip(rows, texts):
        for token in text:
            row[token] += idf[token]
        row /= np.linalg.norm(row) or 1
    return rows


def convolution(params, x, circular):
    """Strided by 4, every output by itself: ``[B, W, C]`` to ``[B, outputs, O]``."""
    kernel = params["kernel"]
    size, width = len(kernel), x.shape[1]
    first = -2 * (size // 4 - 1) if circular else 0
    outputs = width // 4 if circular else (width - size) // 4 + 1
    y = np.zeros((len(x), outputs, kernel.shape[2])) + params["bias"]
    for i in range(outputs):
        for j in range(size):
            y[:, i] += x[:, (first + 4 * i + j) % width] @ kernel[j]
    return y


def adaptive_pool(x, outputs):
    inputs = x.shape[1]
    means = []
    for i in range(outputs):
        start, stop = math.floor(i * inputs / outputs), math.ceil((i + 1) * inputs / outputs)
        means.append(x[:, start:stop].mean(axis=1))
    return np.stack(means, axis=1)


def word_attention(params, moving, x, train=False):
    """X ``[B, words, D]`` to H' ``[B, D, words]`` as printed, and the new directions."""
    unbiased = lambda p: {"kernel": p["kernel"]}
    outputs, moved = [], {}
    for x_i in x:
        mapped, moved["words"] = spectral_linear(
            unbiased(params["words"]), moving["words"], x_i.T, train
        )
        h = params["words"]["gain"] * (x_i @ x_i.T) @ mapped.T + x_i
        mapped, moved["dimensions"] = spectral_linear(
            unbiased(params["dimensions"]), moving["dimensions"], h, train
        )
        outputs.append(params["dimensions"]["gain"] * (h.T @ x_i) @ mapped.T + h.T)
    return np.stack(outputs), moved


def inception(params, moving, table, texts, *, length, experts, train=False):
    """Meta and extreme features without dropout, and the new moving values."""
    filled = np.array([len(text) > 0 for text in texts])
    x = np.zeros((len(texts), length, table.shape[1]))
    for i, text in enumerate(texts):
        x[i, : len(text[:length])] = table[text[:length]]
    attended, moved = word_attention(params, moving, x, train)

    def norm(name, x):
        y, moved[name] = batch_norm(params[name], moving[name], x, filled, train)
        return y

    first = attended @ params["first"]["kernel"] + params["first"]["bias"]
    first = norm("first_norm", gelu(first))
    maps = [convolution(params[f"kernel{size}"], first, circular=True) for size in (4, 8, 16)]
    if experts:
        count = np.array([max(1, min(length, len(text))) for text in texts])
        mean = attended.sum(axis=2) / count[:, None]
        route = sigmoid(mean @ params["router"]["kernel"] + params["router"]["bias"])
        pooled = np.stack([first[:, i : i + 4].mean(1) for i in range(0, first.shape[1], 4)], 1)
        inner = pooled + sum(route[:, k, None, None] * maps[k] for k in range(3))
    else:
        inner = np.concatenate(maps, axis=2)
    inner = norm("inception_norm", gelu(inner))
    outputs, flat = [], None
    for task in ("meta", "extreme"):
        name = task if experts else "shared"
        if flat is None or experts:
            y = convolution(params[f"{name}_second"], inner, circular=False)
            flat = norm(f"{name}_norm", gelu(y)).reshape(len(x), -1)
        y, moved[f"{task}_head"] = spectral_linear(
            params[f"{task}_head"], moving[f"{task}_head"], flat, train
        )
        if not experts:
            y = gelu(y) + adaptive_pool(flat, table.shape[1])
        outputs.append(np.where(filled[:, None], y, 0))
    return outputs, moved
