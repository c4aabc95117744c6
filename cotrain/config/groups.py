"""Groups of settings that several commands share."""

from collections.abc import Mapping
from pathlib import Path as File
from typing import Annotated, Any

from cotrain.config.base import (
    Count,
    Decay,
    Dtype,
    Fraction,
    Least,
    Mark,
    Nodes,
    Path,
    Positive,
    ServedDtype,
    Settings,
    Share,
    Size,
    Some,
    Store,
    Temperature,
    Text,
    allowed,
    at_least,
    one_of,
)
from cotrain.losses.names import LOSSES

TrainingSize = Annotated[Size, Mark.TRAINING]
OF_PATH = ("pretrained", "transplant")  # values of init= with which draft.path= has the initial weights


class Regime(Settings):
    """Sampling settings of the target and the draft (`inference.sampling.Sampling`)."""

    presets = {}

    temperature: Temperature = 1.0
    """Logits are divided by it; 0: greedy."""
    top_k: Count = 0
    """The number of likeliest tokens that are kept; 0: all."""
    top_p: Fraction = 1.0
    """The probability of the likeliest tokens that are kept."""


class ServedRegime(Settings):
    """The sampling settings of a command that reads a draft folder. null: the value that the folder stores."""

    presets = {}

    temperature: Temperature | None = None
    """Logits are divided by it; 0: greedy; null: the folder's."""
    top_k: Count | None = None
    """The number of likeliest tokens that are kept; 0: all; null: the folder's."""
    top_p: Fraction | None = None
    """The probability of the likeliest tokens that are kept; null: the folder's."""


class PolicySettings(Settings):
    """The draft length. k: the draft length in every round. null: the plan in the draft folder, which is a draft length
    or a tree."""

    presets = {"fixed": {}, "planned": {"k": None}}

    k: Size | None = 4
    """Drafts of a round (num_speculative_tokens in vLLM); null: as the draft folder was planned."""


class ServedPolicy(PolicySettings):
    """The same as `PolicySettings`, for commands that can run without drafts (k=0) or with an adaptive policy."""

    k: Count | None = 4
    """Drafts of a round (num_speculative_tokens in vLLM); null: as the draft folder was planned; 0: no drafts."""
    file: Path = None
    """An adaptive policy, which `cotrain plan` has written; null for a fixed draft length."""


class Model(Settings):
    """A model on disk or on the hub. path=null, in a command that reads a draft folder: the target that the folder
    names."""

    path: Path = None
    """A folder or hub id."""


class ServedTarget(Settings):
    """The target of a command that reads a draft folder. path=null: the target and the adapter that the folder
    names."""

    path: Path = None
    """A folder, hub id or GGUF file, bundled, bundled_t5 or smollm2; null: the target that the draft folder names."""
    adapter: Path = None
    """A PEFT folder; null: none or, in commands that read a draft folder, the one that it names."""
    dtype: Dtype = "auto"
    """auto: the dtype of the checkpoint, or float32 on a CPU that would emulate it."""
    trust_remote_code: bool = False
    """Run the Python code of a model on the hub."""
    device_map: Annotated[str, one_of("auto")] | None = None
    """auto: the layers are spread over this machine's GPUs and its memory or, in a training of several processes,
    sharded over these; null: each process has the whole target."""

    @classmethod
    def foreign(cls, command: type[Settings]) -> Mapping[str, str]:
        """Return `device_map` with the reason if the command loads no weights of the target, otherwise {}. command: the
        class of its settings."""
        loads = "quantisation" in command.model_fields
        return {} if loads else {"device_map": "this command loads no weights of the target: leave it out"}


class Target(ServedTarget):
    """The model that is served. path=bundled selects the model shipped in data/target.

    adapter: a PEFT folder. If the target is not quantised, or quantisation.kind=int8_rows, the adapter is merged into
    the weights, before these are rounded. With other quantisations it stays unmerged.
    """

    presets = {}

    path: Annotated[str, Mark.PATH] = "bundled"
    """A folder, hub id or GGUF file; bundled, bundled_t5 and smollm2 are the targets that ship or come from a
    package."""


class Teacher(Settings):
    """Serving engines that run the target, so that it need not fit here (docs/large-targets.md)."""

    presets = {"default": {}}

    url: Annotated[Text, Mark.TRAINING, Mark.FREE] = None
    """Servers that `cotrain teacher` describes, several divided by commas: they sample the texts, and give the target's
    states; null: this process has the target."""

    @property
    def urls(self) -> list[str]:
        """Return the servers' addresses."""
        return [url.strip() for url in (self.url or "").split(",") if url.strip()]


class Quantisation(Settings):
    """The target's weight quantisation, in training and in serving: none, int8 or nf4 (bitsandbytes). Commands that
    read a draft folder also accept as_trained: the quantisation that the folder stores."""

    presets = {}

    kind: str = "none"
    """none, int8, nf4, int8_rows or, in commands that read a draft folder, as_trained."""


class Init(Settings):
    """The source of the draft's initial weights."""

    presets = {
        "scratch": {"kind": "scratch", "layers": []},
        "target_layers": {},
        "pretrained": {"kind": "pretrained", "layers": []},
        "transplant": {"kind": "transplant", "layers": []},
    }

    kind: Annotated[str, one_of("scratch", "target_layers", *OF_PATH)] = "target_layers"
    """scratch, target_layers, or pretrained: the folder draft.path=, of the same or a related kind; the draft has its
    shape and known tokens. transplant, for independent drafts: draft.path= is a small LM with another tokenizer."""
    layers: list[int] = [0, 1, -2, -1]
    """Indices of the target's layers; -1 is the last."""


class Loss(Settings):
    """The loss expressions of a training: `first` until the share `switch` of the training is done, and `then`
    afterwards. The module `cotrain/losses/spec.py` describes how expressions are written."""

    presets = {
        **{name: {"first": name, "then": None, "switch": 1.0} for name in LOSSES},
        "kl_then_nla": {"then": "nla"},
        "kl_then_tv": {},
    }

    first: str = "kl"
    """A loss, or a weighted sum of losses, until the switch."""
    then: str | None = "tv"
    """The same, from the switch on; null: `first`."""
    switch: Share = 0.5
    """The share of the training after which `then` counts: of its steps, or of its minutes if that is larger."""
    decay: Least | None = None
    """For drafts whose distribution depends on the depth: the loss at a depth has the weight decay ** depth. null: the
    number of target calls that acceptance at this depth saves."""

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return the settings that have no effect in this run, as name -> the reason: `then` if the loss never
        switches, `switch` if there is no second loss, and `decay` if the draft's distribution does not depend on the
        depth. run: all settings of the command."""
        wrong = {}
        if run.draft.trained and not run.draft.by_depth:
            wrong["decay"] = "this draft has the same distribution at all depths: leave out loss.decay="
        if self.switch >= 1:
            wrong["then"] = "the loss never switches: set loss.switch=0.5"
        if self.then is None:
            wrong["switch"] = "no second loss is set: set loss.then=tv"
        return wrong


class Data(Settings):
    """The source of texts. A row of the user's data is a whole prompt, a text that begins with a prompt, or a
    conversation; the module `cotrain/data/rows.py` describes how these are recognised. The embedded corpora are texts
    on this machine: the standard library, installed packages, and records from a seeded generator."""

    presets = {"embedded": {}, "self": {"from_target": True}}

    path: Path = None
    """A jsonl, parquet, csv or text file (also compressed), a glob, a folder of such files, a saved data set, or a hub
    id. null selects the embedded corpora."""
    from_target: bool = False
    """With path=null: the target samples the prompts itself, as in cotrain/rollout/self_prompts.py (arXiv
    2406.08464)."""
    column: str | None = None
    """The column of prompts, texts or conversations; null: messages, conversations, prompt, instruction or text,
    whichever of them a row has first."""
    split: str = "train"
    """The part of a folder, a saved data set or a data set of the hub that is read."""
    bytes: dict[str, int] = {"code": 4_000_000, "prose": 2_500_000, "records": 500_000}
    """Embedded corpora: the size of each domain, for training."""
    held_out_bytes: dict[str, int] = {"code": 600_000, "prose": 300_000, "records": 100_000}
    """The same, for evaluation."""
    block: Annotated[int, at_least(2)] = 256
    """Tokens of a packed block, for corpus steps."""
    template: dict[str, Any] = {}
    """Options of the target's chat template, such as enable_thinking."""
    on_target: bool = False
    """The texts were sampled from this target, so conversations are learnt from without sampling."""
    shares: dict[str, Share] = {}
    """By domain: the share of its rollouts that is learnt from; other domains: all."""
    embedded_shares: dict[str, Share] = {"records": 0.1}
    """The same for embedded domains that `shares` does not name; few records are enough to learn from."""
    config: str | None = None
    """The configuration, of a data set that has several."""
    chat: bool | None = None
    """Whether a prompt or text becomes a user's message in the target's chat template. null: prompts do, if the target
    has a template. Messages always do."""
    streaming: bool = False
    """Read only the first `take` rows, for data that does not fit into memory."""
    take: int = 20_000
    """The number of rows that are read with streaming=true."""

    @classmethod
    def foreign(cls, command: type[Settings]) -> Mapping[str, str]:
        """Return the settings of texts to learn from, as name -> the reason, for a command that learns from none.
        command: the class of its settings."""
        has = command.model_fields
        names = [] if "trainer" in has else ["block", "on_target", "shares", "embedded_shares"]
        if "rollout" not in has:
            names += ["from_target", "held_out_bytes"] + ["bytes"] * ("draft" in has)
        return dict.fromkeys(names, "this command learns from no texts: leave out this setting")

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return the settings that have no effect with this source of texts, as name -> the reason. run: all settings
        of the command."""
        path, wrong = str(self.path), {}
        file = File(path).is_file() or bool(set(path) & set("*?["))
        if not self.streaming:
            wrong["take"] = "it applies to streams only: set data.streaming=true, or leave out data.take="
        if self.path is None or (not self.config and file):
            wrong["split"] = "it applies only to a folder, a saved data set or the hub: leave out data.split="
        if self.path is None:
            wrong["config"] = "it applies to data sets only: set data.path=, or leave out data.config="
        elif file:
            wrong["config"] = (
                "it applies to data sets with several configurations, and a file has none: leave out data.config="
            )
        return wrong


class Rollout(Settings):
    """The texts that the target samples, for training and for evaluation. Lengths are in tokens."""

    presets = {"default": {}}

    texts: TrainingSize = 600
    """The most texts per domain, for training; for a target of 0.5 billion parameters or more the default follows its
    size."""
    held_out_texts: TrainingSize = 24
    """The most texts per domain, for evaluation."""
    prompt_tokens: Count = 0
    """Longer prompts are not used, longer texts are cut to this length. 0: the length that 95 % of the prompts of
    data.path do not exceed, or 48 if data.path has no prompts."""
    new_tokens: TrainingSize = 208
    """Tokens that are sampled per text."""
    temperatures: Annotated[list[Temperature], Mark.TRAINING, Mark.FREE] = [0.0, 0.5, 1.0]
    """The temperatures of the held-out texts."""
    train_temperatures: Annotated[list[Temperature], Mark.TRAINING] = []
    """The temperatures of the training texts, equally many texts at each; []: draft.temperatures, or the regime's
    temperature."""
    rows: TrainingSize = 32
    """Prompts that are continued at once."""
    seed: int = 1
    """The seed of the choice of prompts and of the sampled texts."""
    url: Annotated[Text, Mark.TRAINING] = None
    """An OpenAI-compatible server that samples the texts; null: this engine samples them."""
    folder: Annotated[Store, Mark.FREE] = None
    """Where the texts are stored, for runs that share them; null: in the run's folder."""

    @classmethod
    def foreign(cls, command: type[Settings]) -> Mapping[str, str]:
        """Return the settings that only `cotrain train` reads, as name -> the reason, for another command; otherwise
        {}. command: the class of its settings."""
        why = "cotrain rollout samples at regime.temperature=, and trains no draft: leave out this setting"
        return {} if "trainer" in command.model_fields else dict.fromkeys(("temperatures", "train_temperatures"), why)


class Joint(Settings):
    """Settings of mode=joint, which trains an adapter of the target together with the draft (the module
    `cotrain/training/joint.py`). The target changes a little, so that it agrees more with its draft."""

    presets = {"default": {}}

    epsilon: Positive = 0.01
    """The bound: mean KL(original target || moved target), in nats per token of held-out texts of both, certified with
    95 % confidence."""
    rank: Size = 8
    """The rank of the LoRA adapter in every projection of the target."""
    lr: Fraction = 1.0e-3
    """Learning rate of the adapter."""
    warm_steps: Count = 600
    """The first steps, in which only the draft learns, from the original target; 0: the draft of draft.path= has
    learnt."""
    steps: Size = 300
    """Steps in which both learn; afterwards the draft learns trainer.steps= from the changed target."""
    every: Size = 1
    """The adapter is updated in one of so many steps."""
    weight: Least | None = None
    """A fixed weight of the KL, without a bound; null: adapted so that the bound holds."""
    detach: Share = 0.0
    """The share of steps in which the target's probabilities pass no gradient to the adapter."""
    uncertified: Annotated[bool, Mark.FREE] = False
    """Export the pair even if its KL is not certified to be within epsilon."""

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return all fields, as name -> the reason, unless mode=joint; with mode=joint {}. run: all settings of the
        command."""
        if run.mode == "joint":
            return {}
        return dict.fromkeys(Joint.model_fields, "it applies to joint training: set mode=joint")


class Optimizer(Settings):
    """Settings of the optimiser and its trapezoidal schedule. warmup and decay are fractions of the training."""

    presets = {"adamw": {}}

    lr: Fraction = 1.0e-3
    """Learning rate. For a target of 0.5 billion parameters or more the default follows its size (docs/choosing.md)."""
    weight_decay: Least = 0.01
    """Weight decay of matrices."""
    betas: Annotated[list[Decay], allowed("two numbers, one per moment", lambda betas: len(betas) == 2)] = [0.9, 0.95]
    """Decay of AdamW's two moments."""
    warmup: float = 0.02
    """The share of the training, of steps or minutes, in which the rate rises."""
    decay: float = 0.5
    """The share of the training, of steps or minutes, in which the rate falls."""


class Trainer(Settings):
    """Settings of the training loop. The defaults are for a few minutes on two cores; batches are small, because a
    short run needs many updates."""

    presets = {"cpu": {}}

    steps: Annotated[Size, Mark.TRAINING, Mark.LONGER] = 2300
    """Steps of the optimiser (batches, not epochs)."""
    minutes: Annotated[Positive | None, Mark.TRAINING, Mark.LONGER] = None
    """Training ends after these minutes or `steps`, whichever comes first, and the schedule follows; null: after
    `steps`."""
    corpus_steps: Annotated[Count, Mark.TRAINING] = 0
    """The first steps, which learn from corpus text; the rest learn from rollouts."""
    batch: TrainingSize = 2
    """Texts of all devices together, per step; for a target of 0.5 billion parameters or more the default follows its
    size."""
    validations: Annotated[Size, Mark.TRAINING, Mark.FREE] = 2
    """How often held-out texts are judged; each writes a checkpoint."""
    patience: Annotated[Count, Mark.FREE] = 0
    """End after this many validations in a row without a higher tau; 0: never (needs measure=true)."""
    remember_mb: Annotated[Count, Mark.TRAINING, Mark.FREE] = 2000
    """MiB for the target's hidden states of texts that are seen again."""
    checkpoint_minutes: Annotated[Least, Mark.TRAINING, Mark.FREE] = 5.0
    """The longest time between checkpoints; a validation always writes one."""
    cache: Annotated[Store, Mark.TRAINING, Mark.FREE] = None
    """A folder that stores the target's hidden states, for runs that train on the same texts."""
    precision: Annotated[str, Mark.TRAINING] = "auto"
    """Lightning's, with weights in float32: bf16-mixed, 32-true, ...; auto: bf16-mixed, or 32-true on a CPU that would
    emulate it."""
    accumulate: TrainingSize = 1
    """Batches per step."""
    clip: Annotated[Least, Mark.TRAINING] = 1.0
    """The largest gradient norm."""
    accelerator: Annotated[str, one_of("auto", "gpu"), Mark.FREE] = "auto"
    """auto: a GPU if there is one; gpu: an error if there is none."""
    devices: Size = 1
    """Processes on this machine, one per GPU."""
    nodes: Size = 1
    """Machines."""
    strategy: Annotated[str, Mark.TRAINING] = "auto"
    """Lightning's: auto or ddp; fsdp2 shards the draft, its gradients and its optimiser moments."""
    threads: Annotated[Count, Mark.FREE] = 0
    """Threads of torch; 0: torch's default."""
    seed: int = 0
    """The seed of the initial weights and of the order of texts."""
    logger: Annotated[str, one_of("tensorboard", "wandb"), Mark.FREE] = "tensorboard"
    """tensorboard; wandb: TensorBoard and Weights & Biases."""

    @property
    def processes(self) -> int:
        """Return the number of processes on all machines together."""
        return self.devices * self.nodes

    def unread(self, run: Any) -> Mapping[str, str]:
        """Return `patience` with the reason if the run measures nothing, otherwise {}. run: all settings of the
        command."""
        return {} if run.measure else {"patience": "it applies to measured runs only: set measure=true"}


DEPTHS = [2, 3, 4, 5, 6, 7, 8]  # draft lengths to choose from, if none are typed


class Bench(Settings):
    """The sizes of the benchmark.

    With minutes=0 exactly these sizes are measured. Otherwise prompts are timed until the speed-up's 95 % interval is
    narrow enough (see `interval`), or until the minutes are over. Fewer parity tokens are sampled if the minutes are
    too few.
    """

    presets = {
        "default": {},
        "brief": {"prompts": 12, "quick_prompts": 4, "minutes": 1.5},  # for training runs of minutes
    }

    prompts: Size = 30
    """Prompts that are timed, per domain."""
    quick_prompts: Size = 8
    """Prompts of short measurements, such as those at checkpoints."""
    prompt_tokens: Size = 48
    """The tokens of the shipped prompts."""
    new_tokens: Size = 128
    """Tokens that are generated per prompt."""
    parity_tokens: Size = 20_000
    """Tokens on which predicted and measured target calls are compared."""
    rows: Size = 1
    """Prompts that are decoded together."""
    minutes: Least = 10.0
    """The time for the measurement; 0: exactly these sizes."""
    interval: Positive = 0.1
    """Both ends of the interval may differ from the speed-up by this share of it."""
    depths: Some = DEPTHS
    """Draft lengths to choose from; 0 (plain decoding) and 1 are always considered."""
    draft_dtype: Dtype = "bfloat16"
    """The dtype in which the draft is served. auto: its checkpoint's; as_trained, for commands that open a draft
    folder: as the folder was measured."""
    draft_int8: bool | None = True
    """On a CPU, serve the draft with 8-bit weights; null: as the folder was measured, else true."""
    seed: int = 0
    """The seed of the sampled texts."""
    trees: Nodes = 0
    """Most nodes of the draft trees that are considered too; 0: chains, and the tree stored in the folder."""


class ServedBench(Bench):
    """The same as `Bench`, for commands that read a draft folder. Values that are not set are taken from the folder."""

    prompt_tokens: Count = 48
    """0: the value stored in the draft folder."""
    draft_dtype: ServedDtype = "bfloat16"
    """The dtype in which the draft is served. auto: its checkpoint's; as_trained, for commands that open a draft
    folder: as the folder was measured."""


class FolderBench(ServedBench):
    """What is measured, and for how long."""

    depths: list[Size] = DEPTHS
    """Draft lengths to choose from; 0 (plain decoding) and 1 are always considered; []: the length or the tree that the
    folder was planned with."""
