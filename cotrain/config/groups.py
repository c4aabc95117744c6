"""Types of the groups of settings that several commands share. The values are in conf/GROUP/, see `settings`."""

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
    """The regime of a command that opens a draft folder. null selects the value stored in the folder."""

    temperature: float | None
    top_k: int | None
    top_p: float | None


@dataclass
class PolicySettings:
    """Draft length of a command. k: the draft length of every round; null selects the plan stored in the draft
    folder."""

    k: int | None


@dataclass
class ServedPolicy(PolicySettings):
    """As PolicySettings. file: an adaptive policy, which `cotrain plan` has written; null for a fixed draft length."""

    file: str | None


@dataclass
class Model:
    """A model on disk or on the hub."""

    path: str | None


@dataclass
class Target:
    """The model that is served. path=bundled selects the model shipped in data/target. adapter: a PEFT folder. It is
    merged into the weights, before `int8_rows` rounds them, or runs without being merged if these are
    quantised otherwise."""

    path: str
    adapter: str | None
    dtype: str  # auto: the dtype of the checkpoint, or float32 on a CPU that would emulate it
    trust_remote_code: bool


@dataclass
class ServedTarget:
    """The same settings as in Target. path=null selects the target and the adapter that the draft folder names."""

    path: str | None
    adapter: str | None
    dtype: str
    trust_remote_code: bool


@dataclass
class Quantisation:
    """The target's weight quantisation, in training and in serving: none, int8 or nf4 (bitsandbytes). Commands that
    open a draft folder also accept as_trained, the quantisation stored in the folder."""

    kind: str


@dataclass
class Draft:
    """The draft's kind, see `cotrain.students.base`, and its shape. Some settings exist for some kinds only.

    width, layers, intermediate, head_dim, kv_heads: the shape of a draft with random weights. null means the target's.
    """

    kind: str
    path: str | None  # the draft folder to start from, with init=pretrained
    datastore: str | None  # look-up kinds: a folder written by `cotrain datastore`
    shortest: int  # look-up kinds: the least length of a match, in tokens
    width: int | None
    layers: int | None  # null, for an early exit: cotrain.planning.exits chooses
    intermediate: int | None
    head_dim: int | None
    kv_heads: int | None
    quantisation: str  # of the projections when served: none, int8 or nf4; training is then quantisation-aware
    rank: int  # early exit: the rank of the update added to each projection; 0: no update
    depths: int | None  # kinds whose distribution depends on the depth: the number of depths that are trained
    vocabulary: int | None  # kinds with their own head: the number of tokens they can draft; null: as in the target
    head_rank: int | None  # kinds with their own head: the rank of a head of two matrices; null: one matrix
    encoder_layers: int | None  # init=target_layers of an encoder-decoder: its own encoder; null: the target's, shared
    bits: int | None  # kinds that draft with the quantised target: 8 (int8) or 4 (nf4)
    inner: int | None  # two_levels: how many tokens the small draft proposes before the quantised target verifies them
    temperatures: list[float]  # conditioned: the temperatures that it is trained at
    mask: str | None  # block: whether a query attends to all of its block, bidirectional (null), or to the past: causal
    markov: int | None  # kinds that draft in one pass: the rank of the Markov head; null: no such head


@dataclass
class Init:
    """Source of the draft's initial weights. kind: scratch, target_layers (copies of `layers`) or pretrained."""

    kind: str
    layers: list[int]


@dataclass
class Loss:
    """The loss expressions of a training. `first` is the loss until the fraction `switch` of the steps is done, and
    `then` is the loss afterwards, see losses.spec.

    decay: for drafts whose distribution depends on the depth, the loss at a depth has the weight decay ** depth. With
    null, the weight is the number of target calls that acceptance at this depth saves."""

    first: str
    then: str | None
    switch: float
    decay: float | None


@dataclass
class Data:
    """Source of the user's texts. path: a jsonl, parquet, csv or text file (also compressed), a glob, a folder of such
    files, a saved data set, or a hub id. null selects the embedded corpora.

    A row is a whole prompt, a text that begins with a prompt, or a conversation, see data.rows.
    """

    path: str | None
    column: str | None  # of prompts, texts or conversations; null: by the names that data.rows knows
    split: str
    bytes: dict[str, int]  # embedded corpora: the size of each domain, for training
    held_out_bytes: dict[str, int]
    block: int  # tokens of a packed block, for corpus steps
    template: dict[str, Any]  # options of the target's chat template, such as enable_thinking
    on_target: bool  # the texts were sampled from this target, so conversations are learnt from without sampling
    shares: dict[str, float]  # by domain: the share of its rollouts that is learnt from; other domains: all
    embedded_shares: dict[str, float]  # the same for embedded domains that `shares` does not name
    config: str | None  # of a data set that has several
    # Whether a prompt or text becomes a user's message in the target's chat template. null: prompts do, if the target
    # has a template. Messages always do.
    chat: bool | None
    streaming: bool  # read only the first `take` rows, for data that does not fit into memory
    take: int
    from_target: bool  # with path=null: the target samples the prompts itself, see rollout.self_prompts


@dataclass
class Rollout:
    """Texts sampled from the target, to train and to evaluate on. Lengths are in tokens."""

    texts: int  # at most, per domain, for training
    held_out_texts: int  # at most, per domain, for evaluation
    # Longer prompts are not used, longer texts are cut to this length. 0: the length that 95 % of the prompts of
    # data.path do not exceed, or 48 if data.path has no prompts.
    prompt_tokens: int
    new_tokens: int
    temperatures: list[float]  # of the held-out texts
    # Of the training texts, equally many at each; an empty list: draft.temperatures, or the regime's temperature.
    train_temperatures: list[float]
    rows: int  # prompts that are continued at once
    rounds: int  # in how many parts training texts are sampled; after the first, the draft in training speeds it up
    seed: int
    url: str | None  # an OpenAI-compatible server that samples the texts; null: this engine samples them
    folder: str | None  # where the texts are stored, for runs that share them; null: in the run's folder


@dataclass
class Joint:
    """Settings of mode=joint, which trains an adapter of the target together with the draft, see training.joint."""

    epsilon: float  # the bound: mean KL(original target || moved target), in nats per token
    rank: int  # of the LoRA adapter in every projection of the target
    lr: float  # learning rate of the adapter
    warm_steps: int  # first steps: the draft learns alone from the original target; 0: draft.path= has learnt
    steps: int  # steps of both; afterwards the draft learns trainer.steps= from the moved target
    every: int  # the adapter moves in one of so many steps
    weight: float | None  # a fixed weight of the KL, without a bound; null: adapted so that the bound holds
    detach: float  # the share of steps in which the target's probabilities pass no gradient to the adapter
    uncertified: bool  # export the pair even if its KL is not certified to be within epsilon


@dataclass
class Optimizer:
    """Settings of the optimiser and its trapezoidal schedule. warmup and decay are fractions of the training."""

    kind: str  # adamw, or muon: Muon for the matrices of layers, AdamW for the rest
    lr: float
    weight_decay: float
    betas: list[float]
    warmup: float
    decay: float


@dataclass
class Trainer:
    """Settings of the training loop."""

    steps: int
    minutes: float | None  # training ends after these minutes or `steps`, whichever comes first; null: after `steps`
    corpus_steps: int  # the first steps, which learn from corpus text; the rest learn from rollouts
    batch: int  # texts of all devices together
    validations: int
    patience: int  # end after this many validations in a row without a higher tau; 0: never (needs measure=true)
    remember_mb: int  # MiB for the target's hidden states of texts that are seen again
    checkpoint_minutes: float  # the longest time between checkpoints; a validation always writes one
    cache: str | None  # a folder that stores the target's hidden states, for runs that train on the same texts
    # Lightning's, with weights in float32: bf16-mixed, 32-true, ...; auto: bf16-mixed, or 32-true on a CPU that would
    # emulate it
    precision: str
    accumulate: int  # batches per step
    clip: float  # the largest gradient norm
    ema: float  # decay of the moving average of weights that is evaluated and exported; 0: no average
    accelerator: str  # auto: a GPU if there is one; gpu: an error if there is none
    devices: int  # processes on this machine, one per GPU
    nodes: int  # machines
    strategy: str  # Lightning's: auto or ddp; fsdp2 shards the draft, its gradients and its optimiser moments
    threads: int  # 0: torch's default
    seed: int
    logger: str  # tensorboard; wandb: TensorBoard and Weights & Biases


@dataclass
class Bench:
    """The sizes of the benchmark.

    minutes=0 measures exactly these sizes. Otherwise prompts are timed until the speed-up's 95 % interval is narrow
    enough (see `interval`) or the minutes are over. Fewer parity tokens are sampled if the time requires it."""

    prompts: int  # per domain
    quick_prompts: int  # prompts of short measurements, such as those at checkpoints
    prompt_tokens: int  # 0, for cotrain bench: the value stored in the draft folder
    new_tokens: int  # per prompt
    parity_tokens: int  # on which predicted and measured target calls are compared
    rows: int  # prompts that are decoded together
    minutes: float
    interval: float  # both ends of the interval may differ from the speed-up by this share of it
    # Draft lengths to choose from; 0 (plain decoding) and 1 are always considered. [], for cotrain bench: the length or
    # the tree that the folder was planned with.
    depths: list[int]
    # The dtype in which the draft is served. auto: its checkpoint's; as_trained, for commands that open a draft folder:
    # as the folder was measured.
    draft_dtype: str
    draft_int8: bool | None  # on a CPU, serve the draft with 8-bit weights; null: as the folder was measured, else true
    compile: bool  # compile the short passes of both models, see inference/models/compiled.py
    seed: int
    trees: int  # most nodes of the draft trees that are considered too; 0: chains, and the tree stored in the folder
