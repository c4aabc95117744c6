"""Types of the groups of settings that commands share. conf/GROUP/ holds the values, see `settings`."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Regime:
    """Sampling settings of the target and the draft (`inference.sampling.Sampling`)."""

    temperature: float
    top_k: int
    top_p: float


@dataclass
class ServedRegime:
    """The regime of a command that opens a draft folder. null: the value in the folder."""

    temperature: float | None
    top_k: int | None
    top_p: float | None


@dataclass
class PolicySettings:
    """How many tokens to draft: always k; null is what a draft folder was planned with."""

    k: int | None


@dataclass
class Model:
    """A model on disk or on the hub."""

    path: str | None


@dataclass
class Target:
    """The model that is served; `bundled` is the one shipped under data/target. adapter: a PEFT folder, merged into the
    weights, or beside them where they are quantised."""

    path: str
    adapter: str | None
    dtype: str  # auto: the checkpoint's own, or float32 on a CPU that would emulate it
    trust_remote_code: bool


@dataclass
class ServedTarget:
    """The same settings as Target. path=null: the target that the draft folder names, with its adapter."""

    path: str | None
    adapter: str | None
    dtype: str
    trust_remote_code: bool


@dataclass
class Quantisation:
    """The target's weight quantisation while it teaches and serves: none, int8 or nf4 (bitsandbytes). as_trained, of
    commands that open a draft folder: as the folder says."""

    kind: str


@dataclass
class Draft:
    """kind: of draft, see `cotrain.students.base`. The shape of one that starts from random weights, null where it is
    the target's; `path` for init=pretrained. quantisation: of its projections when it is served (none, int8, nf4):
    training is then quantisation-aware. datastore: a folder of `cotrain datastore`, of kinds that look up; shortest:
    tokens of a text's end that must have stood before. depths: drafts of a round that it is trained for, of a kind
    whose distribution depends on the depth. vocabulary: so many tokens are all that it drafts, of a kind with a head of
    its own; null: those of the target. head_rank: its head is a product of two matrices of this rank; null: one.
    bits: of the target's weights, of kinds that draft with the target in fewer bits: 8 (int8) or 4 (nf4). inner:
    guesses that the small draft of two levels makes before they are verified. temperatures: of a kind that is told the
    temperature, those that it learns at; a text of each is learnt at its own."""

    kind: str
    path: str | None
    datastore: str | None
    shortest: int
    width: int | None
    layers: int | None  # null: of an early exit those that a planner chooses, see cotrain.bench.exit_planner
    intermediate: int | None
    head_dim: int | None
    kv_heads: int | None
    quantisation: str
    rank: int  # of what an early exit adds to each projection of its layers; 0: nothing
    depths: int | None
    vocabulary: int | None
    head_rank: int | None
    bits: int | None
    inner: int | None
    temperatures: list[float]


@dataclass
class Init:
    """Where the draft's first weights come from: scratch, target_layers (which ones) or pretrained; cosine: weight of
    1 - cosine of both final hidden states beside the loss at first, falling to 0 where the loss switches, for a draft
    with the target's width and head."""

    kind: str
    layers: list[int]
    cosine: float


@dataclass
class Loss:
    """`first` until the fraction `switch` of the steps is done, then `then`, see losses.spec. decay: for drafts
    whose distribution depends on the depth, a depth weighs decay ** depth; null: as many target calls as acceptance at
    that depth saves."""

    first: str
    then: str | None
    switch: float
    decay: float | None


@dataclass
class Data:
    """Texts: a jsonl, parquet, csv or text file (.gz too), a pattern, a folder of such files or a saved data set, or a
    hub id; null: the embedded corpora, so many bytes of each. A row of text is a prompt or begins with one, a row with
    a prompt is that prompt; conversations: see data.conversations. shares: how many of a domain's
    rollouts are learnt from, all when it is not named."""

    path: str | None
    column: str
    split: str
    bytes: dict[str, int]
    held_out_bytes: dict[str, int]
    block: int
    template: dict[str, Any]  # handed to the target's chat template, as enable_thinking
    on_target: bool  # the texts were sampled from this very target: conversations need no sampling then
    shares: dict[str, float]
    embedded_shares: dict[str, float]  # of the embedded domains, where `shares` does not name them
    config: str | None  # of a data set that has several
    chat: bool | None  # texts and prompts are what a user says, in the target's chat template; false: given as they are
    streaming: bool  # read only the first `take` rows, for what does not fit memory
    take: int


@dataclass
class Rollout:
    """Texts sampled from the target: prompts a domain for training and for evaluation, and their lengths in tokens."""

    texts: int  # at most, of each domain, to learn from
    held_out_texts: int  # at most, of each domain, to be judged on
    # longer prompts are left out, texts are cut to so many; 0: as long as 95 % of data.path's prompts, 48 without such
    prompt_tokens: int
    new_tokens: int
    temperatures: list[float]  # of the held-out texts
    train_temperatures: list[float]  # of those learnt from, as many of each; none: draft.temperatures, or the regime's
    rows: int
    rounds: int  # training texts are sampled in so many parts, all but the first sped up by the draft under training
    on_draft: float  # share of the prompts of all rounds but the first that the draft itself continues
    seed: int
    url: str | None  # of an OpenAI-compatible server that samples them; null: this engine
    folder: str | None  # where they are kept, for runs that share them; null: in the run's own folder


@dataclass
class Optimizer:
    """AdamW and its trapezoidal schedule; warm-up and decay as fractions of the training."""

    lr: float
    weight_decay: float
    betas: list[float]
    warmup: float
    decay: float


@dataclass
class Trainer:
    """Lightning's side: corpus_steps of the steps learn from corpus text, the rest from rollouts; remember_mb of the
    target's hidden states are kept for texts that come again. batch: of all devices together."""

    steps: int
    minutes: float | None  # of training: it ends with whichever comes first, and its schedule with it; null: with steps
    corpus_steps: int
    batch: int
    validations: int
    patience: int  # end when so many validations in a row brought no higher tau; 0: never (with measure=true)
    remember_mb: int
    checkpoint_minutes: float  # a checkpoint at least as often, besides those of validations
    cache: str | None  # a folder of the target's hidden states, for runs that read the same texts
    # store so many of the most probable tokens a position, see cotrain.teacher.target_distributions; 0: states
    top: int
    precision: str  # of Lightning: bf16-mixed, 32-true, ...; auto: the first, unless a CPU would emulate it
    accumulate: int  # batches a step
    clip: float
    ema: float  # decay of the average of weights that is judged and exported; 0: the weights themselves
    accelerator: str  # auto: the GPU where there is one; gpu: refused without one
    devices: int  # processes of this machine, one a GPU
    nodes: int  # machines
    strategy: str  # of Lightning: auto, ddp; fsdp2: the draft, its gradients and moments in parts
    threads: int  # 0: as many as torch finds
    seed: int
    logger: str  # tensorboard; wandb: to Weights & Biases too


@dataclass
class Bench:
    """What is timed: prompts a domain, new tokens of each, rows decoded together, tokens for the parity check. The
    draft is served in draft_dtype (auto: its own), its weights rounded to 8 bits on a CPU when draft_int8.

    More prompts are timed, and parity tokens given up, until the speed-up's 95 % interval ends within `interval` of its
    value, as a share of it, or `minutes` are over; minutes=0: exactly what is asked for, however long it takes. trees:
    nodes of a round, at most, of trees that are considered in place of chains; 0: chains, and the folder's own tree."""

    prompts: int
    quick_prompts: int
    prompt_tokens: int  # 0, of cotrain bench: as the draft folder says
    new_tokens: int
    parity_tokens: int
    rows: int
    minutes: float
    interval: float
    depths: list[int]  # draft lengths to choose from, beside 0 (plain decoding) and 1
    draft_dtype: str
    draft_int8: bool
    compile: bool  # both models' short passes, see inference/models/compiled.py
    seed: int
    trees: int


@dataclass
class Matrix:
    """Many arms over temperatures (none: no matrix) and batch sizes; k: the draft length of engines that plan none;
    vllm: the interpreter of a vLLM installation. targets, drafts: instead, weight quantisations (none, int8, nf4)."""

    temperatures: list[float]
    batches: list[int]
    k: int
    vllm: str | None
    targets: list[str]
    drafts: list[str]


@dataclass
class TargetShape:
    """The bundled target's shape; widths are multiples of 64."""

    vocabulary: int
    width: int
    layers: int
    intermediate: int
    kv_heads: int
    context: int


@dataclass
class Pretraining:
    """Legs of pretraining: each ends after `minutes` or at `steps`, whichever is first."""

    steps: int
    batch: int
    lr: float
    embedding_lr: float
    weight_decay: float
    warmup: int
    decay: int
    minutes: float
    validate_every: int
    precision: str
    compile: bool
    threads: int
    seed: int
