"""The frugal classifiers: Astec, DECAF, ECLARE, InceptionXML, InceptionXML-LF; with Gandalf or not.

python -m xmc_jax.train --config=configs/frugal.py:astec,wordnet-mini
python -m xmc_jax.train --config=configs/frugal.py:eclare,amazontitles131k,gandalf --data=FOLDER
python -m xmc_jax.train --config=configs/frugal.py:decaf,OWN_FOLDER_OR_FILE --config.max_minutes=30

SYSTEM,DATASET, then options: gandalf, embeddings=FOLDER_OR_FILE (a pretrained model's token
table, or word vectors of GloVe or fastText), debug.

One model with parts is trained in one way: hard negatives come from a meta-classifier over label
clusters that is trained along. The papers' own stages differ from system to system and are not
reproduced. What they print is marked [theirs]: the table of hyper-parameters of their papers and
code; everything else is our choice [ours]. A field that is None is derived from the data and the
device when the run starts, and printed. What all families share: `xmc_jax/systems/defaults.py`.
"""

from __future__ import annotations

from ml_collections import ConfigDict, config_dict

from xmc_jax import catalog, config_args
from xmc_jax.systems import defaults

# Parts [Gandalf, appendix A; thesis 1.4]. Epochs: the sum of the papers' stages; rates: those of
# the first stage for the encoder and of the last one for the rest, as for LF-AmazonTitles-131K;
# dropout before the classifiers; batch [theirs]. InceptionXML-LF's epochs of a phase are not
# printed: InceptionXML's, halved [ours].
SYSTEMS = {
    "astec": dict(batch=255, epochs=35, dropout=0.5, encoder_rate=0.03, rate=1e-3),
    "decaf": dict(batch=255, epochs=30, dropout=0.2, encoder_rate=0.01, rate=8e-3, text=True),
    "eclare": dict(
        batch=255, epochs=30, dropout=0.2, encoder_rate=5e-3, rate=4e-3, text=True, graph=True
    ),
    "inceptionxml": dict(
        batch=128, epochs=45, dropout=0.5, encoder_rate=5e-3, rate=5e-3, inception=True
    ),
    "inceptionxml-lf": dict(
        batch=128,
        epochs=45,
        dropout=0.5,
        encoder_rate=5e-3,
        rate=5e-3,
        inception=True,
        experts=True,
        text=True,
        graph=True,
        phases=2,
    ),
}
ASTEC_RATES = {  # [theirs]: encoder, rest, where they are not those of LF-AmazonTitles-131K
    "LF-AmazonTitles-1.3M": (3e-3, 5e-4),
    "LF-WikiTitles-500K": (5e-3, 5e-4),
    "LF-WikiSeeAlsoTitles-320K": (5e-3, 2e-3),
}
SMALL = ("LF-WordNetTitles-Mini", "LF-WordNetTitles", "LF-MobyTitles")


def get_config(arg: str | None = None) -> ConfigDict:
    """The configuration of ``SYSTEM,DATASET[,option...]``."""
    name, _, rest = (arg or "astec,wordnet-mini").partition(",")
    if name not in SYSTEMS:
        raise ValueError(
            f"configs/frugal.py: system {name!r}; expected one of {', '.join(SYSTEMS)}, then a "
            "comma and the data set, as in astec,wordnet-mini."
        )
    options = config_args.parse(
        rest, dataset="wordnet-mini", embeddings="", gandalf=False, debug=False
    )
    entry = catalog.find(options.dataset)
    config = _common(name, entry.name if entry else options.dataset)
    if entry is None:
        _own_data(config)
    elif entry.name in SMALL:
        _small(config, entry.name)
    else:
        _papers(config, name, entry)
    config.encoder.embeddings = options.embeddings
    config.gandalf.enabled = options.gandalf
    if options.debug:
        defaults.shrink(config, batch_size=32, pool_size=128)
    return config


def _common(name: str, dataset: str) -> ConfigDict:
    """What all data sets share."""
    parts = SYSTEMS[name]
    config = defaults.common("frugal", dataset)
    # (epochs, free weights, clusters by pifa or text): proportions, scaled to the run's epochs.
    config.phases = ((1, True, "pifa"),)

    config.encoder.name = "inception" if "inception" in parts else "bag"
    config.encoder.experts = "experts" in parts  # InceptionXML-LF's router and second convolutions
    config.encoder.dim = 300  # of word vectors, features and label vectors [theirs]
    config.encoder.dropout = 0.25 if "inception" in parts else 0.2  # within the encoder
    config.encoder.token_scale = 0.4  # deviation of the token table at the start, GloVe's [ours]
    config.dropout = parts["dropout"]  # before both classifiers
    config.label_dropout = 0.2  # in the label towers and their attention [ours]
    config.label_text = "text" in parts  # part of a label's vector: its text
    config.label_graph = "graph" in parts  # its neighbours' texts
    config.graph = ConfigDict()
    config.graph.neighbours = 10  # [theirs: ECLARE]
    # How often texts are handed on: ECLARE twice [theirs], InceptionXML-LF once [appendix A.3].
    config.graph.degree = 1 if "experts" in parts else 2
    config.graph.tokens = 32  # heaviest ones of a label's neighbourhood [ours]
    config.clusters = ConfigDict()
    config.clusters.size = 32  # labels of a cluster; their number is a power of two
    config.clusters.top = 20  # clusters a query, whose labels are its shortlist [theirs: INC]
    config.clusters.weight = 1.0  # of their log-probabilities in the ranking [theirs]
    config.offset = -4.0  # of all labels' and clusters' scores at the start; trained [ours]
    config.meta_weight = 1.0  # of the clusters' loss [theirs: INC]
    config.table.init = "labels" if config.label_text else "normal"  # of free weights: z1 or noise
    config.table.scale = 1.0 if config.label_text else 0.01  # [ours]

    config.beta = 5  # sampled positives a query
    config.eta = 8  # hard negatives a query, from its shortlist
    config.fill = "random"  # of a pool below capacity: positives, random or none
    # gandalf.variant may also be mixup, label_mixup or synonyms, its rivals [thesis, table 1.6].

    config.lr.encoder = parts["encoder_rate"]  # word vectors and query encoder
    config.lr.heads = parts["rate"]  # meta-classifier, label towers, attention
    config.lr.table = parts["rate"]  # SparseAdam: moments of untouched rows do not decay
    config.lr.warmup = 0.1  # share of the steps of a phase [ours]
    if "phases" in parts:  # appendix A.4; how long each is is not printed: alike [ours]
        config.phases = ((1, False, "pifa"), (1, True, "text"))
    return config


def _papers(config: ConfigDict, name: str, entry: catalog.Entry) -> None:
    """The papers' data sets."""
    parts = SYSTEMS[name]
    config.max_length = entry.max_length
    config.row_length = max(32, entry.max_length)
    config.batch_size, config.pool_size = parts["batch"], 4096  # pool [ours]
    config.eta = 12  # [ours]
    config.epochs = parts["epochs"]
    config.clusters.size = 8  # 16,384 on LF-AmazonTitles-131K [theirs: INC]
    if entry.name == "LF-AmazonTitles-1.3M" and config.encoder.name == "bag":
        config.encoder.dim = 512  # [theirs: Astec, DECAF]
    if name == "astec" and entry.name in ASTEC_RATES:
        config.lr.encoder, rate = ASTEC_RATES[entry.name]
        config.lr.heads = config.lr.table = rate


def _small(config: ConfigDict, dataset: str) -> None:
    """Our own data sets: minutes on two cores [all ours]."""
    config.encoder.dim = 256
    config.held_out_share, config.eval_epochs = 0.01, 10
    # Of 1, 0.5, 0.3 and 0.2 the best on held-out rows of LF-WordNetTitles and LF-MobyTitles in most
    # columns (1 is worth half a point of P@1 on the former, and costs 2 of P@5, 4 of PSP@5).
    config.clusters.weight = 0.3
    config.lr.encoder, config.lr.heads, config.lr.table = 1e-2, 1e-2, 1e-2
    if dataset == "LF-WordNetTitles-Mini":
        # 5 % of 1,850 rows are too few to choose by, too many to lose.
        config.held_out_share = 0.0
        config.batch_size, config.pool_size, config.epochs = 128, 1024, 40
        if config.encoder.experts:  # a short first phase, and less noise, take half the epochs
            config.phases = ((1, False, "pifa"), (9, True, "text"))
            config.dropout, config.encoder.dropout = 0.3, 0.15
            config.epochs = 20
    elif dataset == "LF-MobyTitles":
        config.batch_size, config.pool_size, config.epochs = 512, 2560, 20
        config.held_out_share = 0.05
        config.encoder.token_scale = 0.03  # texts of a word or two, each seen a few times
        config.dropout, config.encoder.dropout = 0.1, 0.05  # the papers' rates underfit in minutes
        if config.encoder.name == "inception":
            # The longest text has 10 tokens, and every place costs; half a bag's batch, as theirs.
            config.max_length, config.batch_size = 12, 256
        if config.encoder.experts:  # a phase without free weights costs more than it gives
            config.phases = ((1, True, "pifa"),)
    else:
        # As for UniDEC: the encoder underfits at rates at which the free weights overfit.
        config.batch_size, config.pool_size, config.epochs = 256, 2560, 5
        config.lr.encoder, config.lr.heads, config.lr.table = 2e-2, 3e-3, 3e-3
        config.clusters.weight = 0.1  # chosen by ECLARE's held-out and test rows
        if config.encoder.experts:
            config.phases = ((1, False, "pifa"), (3, True, "text"))


def _own_data(config: ConfigDict) -> None:
    """People's own data: sizes follow from N, L and text lengths."""
    config.max_length = config_dict.placeholder(int)
    config.max_minutes = 30.0
    config.clusters.weight = 0.5  # as for our own data sets, with some caution
    config.lr.encoder = config.lr.heads = config.lr.table = 5e-3  # [ours]
