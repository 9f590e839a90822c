"""What the configurations of all families begin with.

Marks at the numbers: [thesis] and [preprint] are printed there, [ours] is our choice. A field that
is None is derived from the data and the device when the run starts, and printed.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict, config_dict

from xmc_jax import catalog


def common(family: str, dataset: str) -> ConfigDict:
    """The fields that every family has; it sets others, and other values of these."""
    config, known = ConfigDict(), catalog.find(dataset) is not None
    config.family = family
    config.dataset = dataset  # name, alias, folder or file
    config.data = ""  # folder of the data set, or a root that holds it; --data sets it
    config.reading = reading_options()
    config.propensity = ""  # A,B of the propensities; "" = the catalog's; --propensity sets it
    config.seed = 0
    config.max_length = 32  # tokens of a text
    config.row_length = 32  # tokens in a packed row; texts longer than that: max_length [ours]
    config.init_from = ""  # work directory of a run whose encoder and heads this one begins with
    config.max_minutes = 0.0  # > 0: as many of the epochs as fit; the cosine ends there
    config.epochs = config_dict.placeholder(int)

    config.encoder = ConfigDict()
    # What a table of token vectors starts from: a pretrained folder's word embeddings, or a file of
    # word vectors of GloVe or fastText.
    config.encoder.embeddings = ""
    config.encoder.vocabulary = "wordpiece"  # of such a table, on the data's texts; or words
    config.encoder.vocab_size = 30_000
    config.encoder.lower = True  # lower-case texts, for a vocabulary that is made of them
    # Take marks off letters; False for people's own data. The others' numbers were made so.
    config.encoder.strip_accents = known
    config.encoder.query_prefix = ""  # stands before every query, as "query: " of E5's models
    config.encoder.label_prefix = ""  # stands before every label's text
    config.classifier = True  # a label's free weights; without them UniDEC is DePSL
    config.table = ConfigDict()
    config.table.dtype = "float32"  # or bfloat16; the two moments stay float32

    config.batch_size = config_dict.placeholder(int)  # Q
    config.pool_size = config_dict.placeholder(int)  # P
    config.hard_negatives = True
    config.fill = "none"  # of a pool below capacity: positives, random or none
    config.extra_positives = 0  # a query, beyond beta, for the classifier alone
    config.extra_pool_size = 0  # room for them
    config.mask_filter_pairs = True  # False only to measure what masking is worth
    config.batching = "random"
    config.refresh_epochs = 5  # the papers' other tau
    config.warmup_epochs = 0  # epochs of random batches before the first refresh
    config.gandalf = gandalf_options()

    config.lr = ConfigDict()
    config.lr.weight_decay = 0.0  # [ours]
    config.lr.clip_norm = 0.0  # 0 = none

    config.held_out_share = 0.05  # of the training rows, to choose the checkpoint; 0 = none
    config.held_out_rows = 10_000  # at most
    # What that is a share of, and of own data without test rows the fifth that is split off: rows,
    # or texts (then one text's rows count as one, however many there are), as of known data sets.
    config.share_of = "texts" if known else "rows"
    config.eval_epochs = 5
    # t: labels are ranked by score + t ln w_l, w_l the inverse propensity: above 0 the rarer ones
    # come earlier, for PSP@k and against P@k. Only ranking reads it (so also that of held-out rows,
    # which chooses the checkpoint by P@5); xmc_jax.evaluate and predict take another.
    config.tail_weight = 0.0
    config.retrieval = retrieval_options()
    config.log_steps = 20
    return config


def retrieval_options() -> ConfigDict:
    """Training points, label texts and their words count beside the model, after training."""
    options = ConfigDict()
    options.enabled = True
    # Weights; all None = chosen on held-out rows; one that is set leaves out the others.
    leave_open(options, float, "points", "labels", "lexical")
    options.neighbours = 50  # m and tau where the weights are set
    options.temperature = 0.1
    options.choose_by = "P@5"  # metric of held-out rows, by which weights are chosen
    return options


def reading_options() -> ConfigDict:
    """How your own files are read (`xmc_jax.data.readers.reading`); the flags of `train` set it."""
    options = ConfigDict()
    leave_open(options, str, "separator", "text_column", "label_column", "encoding")
    leave_open(options, bool, "merge_labels")
    leave_open(options, int, "version")  # of the rules; 1 for runs that were begun by them
    return options


def gandalf_options() -> ConfigDict:
    """Label texts as training points with soft targets."""
    options = ConfigDict()
    options.enabled = False
    # graph [thesis 1.6], self (Z'), walk, symmetric or glas [thesis 1.3]; a family may know more
    options.variant = "graph"
    options.delta = 0.1  # conditionals at or below it are dropped [thesis, table 1.7]
    options.draw = "target"  # positives of a text: in proportion to its targets, or uniform [ours]
    options.points = "all"  # D and Z; labels: Z alone; sample: as many as D [thesis, table 1.2]
    options.share = 1.0  # of the labels, whose texts join [thesis, figure 1.4]
    options.order = "random"  # in which they join; tail: rare ones first, by equal-volume bins
    options.skip_labels_that_are_points = False  # leave out texts that are training texts [ours]
    return options


def leave_open(section: ConfigDict, kind: type[Any], *names: str) -> None:
    """Fields that a run derives: a placeholder each, for a shared one would be set by any."""
    for name in names:
        section[name] = config_dict.placeholder(kind)


def shrink(config: ConfigDict, *, batch_size: int, pool_size: int) -> None:
    """What `debug` means: two epochs of small batches, for a laptop."""
    config.epochs, config.batch_size, config.pool_size = 2, batch_size, pool_size
    config.held_out_share, config.held_out_rows, config.max_minutes = 0.05, 50, 0.0
