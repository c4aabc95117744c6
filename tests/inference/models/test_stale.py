"""Changed weights: an engine, new or not, gives the text of the weights as they are now."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from inference import Engine, Sampling
from inference.models import checksum as checksums
from inference.models import packing
from inference.models.checksum import checksum
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.early_exit import EarlyExit
from inference.proposers.quantised import Quantised
from tests import standin
from tests import tiny as models
from tests.inference.models.test_llama import WIDE, build, passes
from tests.inference.models.test_packing import needs_kernels
from tests.kinds import KINDS, exit_network
from tests.often import often
from tests.tiny import near

# whose weights an engine copies
tiny = partial(models.tiny, dtype=torch.bfloat16)


def small():
    return build("Qwen2", WIDE | {"initializer_range": 0.1}, torch.bfloat16)


def copied(model):
    model.model.layers[1].mlp.down_proj.weight.data.copy_(torch.randn(64, 48))
    return model


def merged(model):
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, settings).merge_and_unload()


@pytest.mark.parametrize("change", [copied, merged])
@pytest.mark.parametrize("int8", [False, True])
def test_a_new_engine_has_the_new_weights(change, int8):
    model = small()
    passes(LM(model, 3, int8=int8))
    versions = [p._version for p in model.parameters()]
    model = change(model)
    assert [p._version for p in model.parameters()] == versions  # nothing was counted
    again = small()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(passes(LM(model, 3, int8=int8)), passes(LM(again, 3, int8=int8)), rtol=0, atol=0)


def test_values_that_move_are_seen():
    """Rows of a matrix, whose columns then add up as before, and columns, whose rows do."""
    layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.float64)
    order, seen = [1, 0, *range(2, 128)], {checksum(layer)}
    layer.weight.data.copy_(layer.weight.data[order])
    seen.add(checksum(layer))
    layer.weight.data.copy_(layer.weight.data[:, order])
    assert len(seen | {checksum(layer)}) == 3


def linear(model):
    """The first projection, or, of heads that have none, what has their weight."""
    return next((m for m in model.modules() if isinstance(m, nn.Linear)), model)


def other(weight, seed=3):
    torch.manual_seed(seed)
    return weight.detach() + 0.3 * torch.randn_like(weight)


def adapted(model):
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def given_data(model):
    linear(model).weight.data = other(linear(model).weight)


def given_a_parameter(model):
    linear(model).weight = nn.Parameter(other(linear(model).weight))


def written_behind_torch(model):
    linear(model).weight.data.copy_(other(linear(model).weight))


def one_value_behind_torch(model):
    weight = model.get_output_embeddings().weight
    weight.data[5] *= 3
    weight.data[0, 0] += 40


@torch.no_grad()
def written(model):
    linear(model).weight.copy_(other(linear(model).weight))


@torch.no_grad()
def added(model):
    model.get_input_embeddings().weight.add_(other(model.get_input_embeddings().weight))


def given_a_layer(model):
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[-1].mlp)
    given_data(model.model.layers[0].mlp)


def hooked(model):
    linear(model).register_forward_hook(lambda module, inputs, output: 1.5 * output)


def hooked_before(model):
    linear(model).register_forward_pre_hook(lambda module, given: (1.5 * given[0],))


def given_a_forward(model):
    plain = linear(model).forward
    linear(model).forward = lambda x: 1.5 * plain(x)


def given_a_buffer(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.5)


def given_a_window(model):
    model.config.sliding_window = 2


def given_a_counted_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def widened(model):
    model.to(torch.float64)


def at_training(model):
    model.train()


@pytest.fixture
def views(monkeypatch):
    """As a CPU that packs nothing."""
    monkeypatch.setattr(packing, "can_pack", lambda *_: False)


WAYS = [
    adapted,
    lambda model: merged(model),
    given_data,
    given_a_parameter,
    written_behind_torch,
    written,
    added,
    one_value_behind_torch,
    given_a_layer,
    hooked,
    hooked_before,
    given_a_forward,
    given_a_buffer,
    widened,
    at_training,
]
NAMES = [way.__name__.replace("<lambda>", "merged") for way in WAYS]
REGIME = {"max_new_tokens": 12, "sampling": Sampling(0.8), "seed": 5, "ignore_eos": True}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]


def texts(engine):
    return engine.generate(PROMPTS, **REGIME).tokens


def dropping():
    """transformers' own forward, which drops values while it trains."""
    return build("Mistral", {"sliding_window": 16, "attention_dropout": 0.5}, torch.float32)


@pytest.mark.parametrize("way", [given_data, given_a_parameter, given_a_layer, given_a_counted_buffer])
def test_an_engine_that_copied_nothing_has_them_too(way, views):
    test_an_engine_has_the_weights_as_they_are(way, "copies")


def test_an_engine_has_the_window_as_it_is():
    test_an_engine_has_the_weights_as_they_are(given_a_window, "own forward")


# each seen as another way is that stays
ALIKE = {given_a_parameter, written, added, hooked_before, given_a_forward, widened, at_training}
TARGETS = {"copies": tiny, "own forward": dropping}


@pytest.mark.parametrize(
    ("way", "target"),
    [
        *often([(way, "copies") for way in WAYS], lambda case: case[0] not in ALIKE),
        *often(
            [(way, "own forward") for way in (given_data, hooked, given_a_forward, at_training, widened)],
            lambda case: case[0] in (given_a_forward, at_training),
        ),
    ],
)
def test_an_engine_has_the_weights_as_they_are(way, target):
    model, again = TARGETS[target](), TARGETS[target]()
    engine = Engine(model, rows=2)
    before = texts(engine)
    torch.manual_seed(9)
    way(model)
    torch.manual_seed(9)
    way(again)
    after = texts(engine)
    assert after == texts(Engine(again, rows=2)) == texts(engine)
    assert after != before or way in (widened, at_training)


def test_an_engine_that_was_not_changed_prepares_nothing_again():
    engine = Engine(tiny(), Independent(near(tiny())), rows=2)
    texts(engine)
    target, draft = engine.target, engine.proposer.lm
    texts(engine)
    assert (engine.target, engine.proposer.lm) == (target, draft)


@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_a_draft_in_fewer_bits_leaves_comparing_to_the_engine(bits, monkeypatch):
    """Once a call. Engines that take turns with a draft have their own text."""
    model, looks, look = tiny(), [], checksums._tensors
    draft = Quantised(model, bits)
    one, other = (Engine(model, draft, policy=Fixed(3), rows=2) for _ in range(2))
    assert texts(one) == texts(other) == texts(one)
    one.target.stamp.addresses = False  # only values are read by tensors
    one.target.stamp.seen = one.target.stamp._look(model)
    monkeypatch.setattr(checksums, "_tensors", lambda given: looks.append(given) or look(given))
    texts(one)
    assert len(looks) == 1


@needs_kernels
def test_each_bit_and_each_place_counts_in_the_hash():
    """Of some bytes and of many, with a last word that is not whole; in tensors that are not contiguous too."""
    assert packing.has_kernels()
    hashed = torch.ops.inference.hash_of
    whole = (torch.arange(300_004) % 251).to(torch.uint8)
    for at in (0, 2, *range(2**14, len(whole), 997), len(whole) - 1):
        flipped, moved = whole.clone(), whole.clone()
        flipped[at] ^= 1 << at % 8
        moved[[at, at - 2**14]] = whole[[at - 2**14, at]]
        assert len({int(hashed([x[:3], x[3:]])) for x in (whole, flipped, moved)}) == 3
    one, other = whole[: 2**17].split(2**16)
    assert hashed([one, other]) != hashed([other, one])
    assert hashed([whole[::2]]) == hashed([whole[::2].contiguous()])


def exiting(target):
    return EarlyExit(exit_network(tiny()), target)


@pytest.mark.thorough
@pytest.mark.parametrize("made", [exiting, Quantised])
@pytest.mark.parametrize("way", [way for way in WAYS if way is not widened], ids=[n for n in NAMES if n != "widened"])
def test_a_draft_of_the_targets_weights_has_them_as_they_are(way, made):
    require_as_new(way, made, tiny(), tiny())


def require_as_new(way, made, model, again):
    engine = Engine(model, made(model), rows=2)
    texts(engine)
    for one in (model, again):
        torch.manual_seed(9)
        way(one)
    assert texts(engine) == texts(Engine(again, made(again), rows=2))


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [("int8", torch.float64), ("int8", torch.float32), ("nf4", torch.bfloat16)],
    ids=lambda one: str(one),
)
def test_a_rounded_copy_has_the_targets_weights_as_they_are(bits, dtype):
    """After a change that moves no weight, so the target's LM stays unless it has copies itself."""

    def doubled(model):
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)

    require_as_new(doubled, partial(Quantised, bits=bits), *(models.tiny(dtype=dtype) for _ in range(2)))


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_draft_has_its_weights_as_they_are(way):
    target, model, again = tiny(), near(tiny(), 0.2), near(tiny(), 0.2)
    engine = Engine(target, Independent(model), policy=Fixed(3), rows=2)
    texts(engine)
    for one in (model, again):
        torch.manual_seed(9)
        way(one)
    out = engine.generate(PROMPTS, **REGIME)
    wanted = Engine(target, Independent(again), policy=Fixed(3), rows=2).generate(PROMPTS, **REGIME)
    assert (out.tokens, out.stats.accepted) == (wanted.tokens, wanted.stats.accepted)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "way"), [("eagle", given_data), ("medusa", given_a_parameter)])
def test_what_is_recorded_of_a_draft_reads_its_weights_as_they_are(kind, way):
    """On a GPU: a recording reads the memory that a weight was in."""
    with standin.device():
        results = []
        for late in (True, False):
            target = tiny(dtype=torch.float32).to("cuda")
            proposer = KINDS[kind].proposer(target)
            network = getattr(proposer.network, "lm_head", proposer.network)  # what recordings read
            if not late:
                way(network)
            engine = Engine(target, proposer, policy=Fixed(2), rows=1)
            if late:
                engine.generate(PROMPTS[:1], **REGIME)
                way(network)
            out = engine.generate(PROMPTS[:1], **REGIME)
            results.append((out.tokens, out.stats.accepted))
    assert results[0] == results[1]


@pytest.mark.parametrize("way", often([given_a_parameter, given_a_layer, hooked], {given_a_layer}.__contains__))
def test_an_exit_that_copied_nothing_shares_what_the_target_has_now(way):
    model, again = tiny(), tiny()
    engine = Engine(model, EarlyExit(exit_network(model, 0), model), rows=2)
    texts(engine)
    network = exit_network(tiny(), 0)
    way(model)
    way(again)
    assert texts(engine) == texts(Engine(again, EarlyExit(network, again), rows=2))


def test_an_exit_has_the_weights_of_its_network_as_they_are():
    model, network, again = tiny(), exit_network(tiny()), exit_network(tiny())
    engine = Engine(model, EarlyExit(network, model), rows=2)
    texts(engine)
    for one in (network, again):
        one.norm.data = other(one.norm)
        change = next(iter(one.layers[0].values()))
        change.up.data.copy_(other(change.up))
    assert texts(engine) == texts(Engine(model, EarlyExit(again, model), rows=2))


def test_an_engine_has_the_numbers_of_its_modules_and_its_end_tokens_as_they_are():
    model, call = small(), {"max_new_tokens": 12, "sampling": Sampling(0.0)}
    engine = Engine(model, rows=1)
    before = engine.generate([[3, 5]], **call).tokens
    for norm in (module for module in model.modules() if hasattr(module, "variance_epsilon")):
        norm.variance_epsilon = 5.0
    rescaled = engine.generate([[3, 5]], **call).tokens
    assert rescaled == Engine(copy.deepcopy(model), rows=1).generate([[3, 5]], **call).tokens != before
    model.generation_config.eos_token_id = rescaled[0][3:4]
    ended = engine.generate([[3, 5]], **call)
    assert ended.finish == ["stop"] and ended.tokens[0] == rescaled[0][: len(ended.tokens[0])]
