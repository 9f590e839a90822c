"""The same training step as a PyTorch user writes it, well.

One Hugging Face model over padded rows (queries and pool labels in one batch, attention by SDPA),
two linear heads, both symmetric losses, fused Adam for encoder and heads, and SparseAdam for the
classifier table, of which only the pool's rows are read. bfloat16 autocast on a GPU.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

from experiments.benchmarks.harness import Subject, cores
from experiments.benchmarks.problem import Batch, Problem


class Peer(nn.Module):
    """UniDEC in PyTorch."""

    def __init__(self, problem: Problem) -> None:
        """Takes the problem's weights."""
        super().__init__()
        kind = AutoConfig.from_pretrained(problem.folder).model_type
        options = {"add_pooling_layer": False} if kind == "bert" else {}
        self.encoder = AutoModel.from_pretrained(
            problem.folder, attn_implementation="sdpa", dtype=torch.float32, **options
        )
        self.de_head = _linear(problem.heads["de_head"])
        self.clf_head = _linear(problem.heads["clf_head"])
        self.dropout = nn.Dropout(problem.options.head_dropout)
        table = torch.from_numpy(problem.table())
        self.table = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """DE of queries and labels, CLF of queries, and the pool's classifier rows."""
        mask = batch["mask"]
        hidden = self.encoder(input_ids=batch["ids"], attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        vectors = (hidden * weights).sum(1) / weights.sum(1)  # [Q + P, H]
        number = batch["targets"].shape[0]
        de = F.normalize(self.dropout(torch.tanh(self.de_head(vectors))), dim=-1)
        clf = self.dropout(self.clf_head(vectors[:number]))
        return de[:number], de[number:], clf, self.table(batch["pool"])


def _linear(params: dict[str, np.ndarray]) -> nn.Linear:
    made = nn.Linear(*params["kernel"].shape)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(params["kernel"].T.copy()))
        made.bias.copy_(torch.from_numpy(params["bias"].copy()))
    return made


def decoupled_softmax(scores: Tensor, targets: Tensor, where: Tensor) -> Tensor:
    """``xmc_jax.losses.decoupled_softmax_loss``: mean over the rows that have a positive."""
    scores = scores.float()
    positive = targets & where
    lowest = torch.finfo(scores.dtype).min
    negatives = scores.masked_fill(targets | ~where, lowest).logsumexp(-1, keepdim=True)
    losses = F.softplus(negatives - scores).masked_fill(~positive, 0).sum(-1)
    counts = positive.sum(-1)
    return (losses / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def symmetric(queries: Tensor, labels: Tensor, batch: dict[str, Tensor], head) -> Tensor:
    """Weighted losses of the scores and of their transposes."""
    scores = queries @ labels.T / head.temperature
    targets, where = batch["targets"], batch["where"]
    forward = decoupled_softmax(scores, targets, where)
    backward = decoupled_softmax(scores.T, targets.T, where.T)
    return head.query_weight * forward + (1 - head.query_weight) * backward


def padded(batch: Batch, num_labels: int, width: int | None, device: str) -> dict[str, Tensor]:
    """Tensors of a batch, texts padded to ``width`` or to the longest; empty slots left out."""
    lengths = batch.lengths
    width = width or int(lengths.max())
    mask = np.arange(width) < lengths[:, None]  # [Q + P, T]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = batch.flat_ids
    pool = batch.packed.pool_ids
    queries = len(lengths) - len(pool)
    labels = pool < num_labels
    texts = np.concatenate([lengths[:queries] > 0, labels])
    arrays = {
        "ids": ids[texts],
        "mask": mask[texts].astype(np.int64),
        "pool": pool[labels].astype(np.int64),
        "targets": batch.packed.targets[texts[:queries]][:, labels],
        "where": batch.packed.where[texts[:queries]][:, labels],
    }
    return {name: torch.from_numpy(array.copy()).to(device) for name, array in arrays.items()}


def train_step(problem: Problem, width: int | None) -> Subject:
    """The step as a contender.

    Args:
      problem: what to train on.
      width: tokens that every text is padded to; None = the longest of its batch.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    options = problem.options
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Peer(problem).to(device)
    batches = [padded(batch, problem.num_labels, width, device) for batch in problem.batches]
    heads = [*model.de_head.parameters(), *model.clf_head.parameters()]
    groups = [
        {"params": model.encoder.parameters(), "lr": options.lr.encoder},
        {"params": heads, "lr": options.lr.heads},
    ]
    adam = torch.optim.Adam(groups, fused=True)
    table_adam = torch.optim.SparseAdam(list(model.table.parameters()), lr=options.lr.table)

    def losses(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        queries, labels, clf, rows = model(batch)
        de = symmetric(queries, labels, batch, options.de)
        found = {"loss_de": de, "loss_clf": symmetric(clf, rows, batch, options.clf)}
        weight = options.de_weight
        return {"loss": weight * de + (1 - weight) * found["loss_clf"], **found}

    def autocast():
        if options.encoder.compute_dtype == "bfloat16":
            return torch.autocast(device, torch.bfloat16)
        return contextlib.nullcontext()

    def turn(number: int) -> None:
        model.train()
        with autocast():
            loss = losses(batches[number % len(batches)])["loss"]
        adam.zero_grad(set_to_none=True)
        table_adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        table_adam.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def close() -> dict[str, int]:
        return {"peak_device_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}

    model.eval()
    with torch.no_grad():
        first = {name: float(value) for name, value in losses(batches[0]).items()}
    tokens = np.mean([batch.lengths.sum() for batch in problem.batches])
    facts = {
        "losses": first,
        "rows": [len(batch["ids"]) for batch in batches],
        "row_length": [batch["ids"].shape[1] for batch in batches],
        "packing": round(float(tokens / np.mean([batch["ids"].numel() for batch in batches])), 4),
        "threads": torch.get_num_threads(),
    }
    return Subject(turn, facts, close)
