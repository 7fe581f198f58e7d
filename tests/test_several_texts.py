"""Several texts of an image: drawn by the sample's seed, through a step, against autograd over the whole batch."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from clip_train.batch import plan_batch
from clip_train.data.config import DataConfig
from clip_train.data.decode import SEED_BOUND, texts_of
from clip_train.data.invalid import InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.config import LossConfig
from clip_train.losses.distillation import Distillation
from clip_train.losses.views import over_texts
from clip_train.recipe.memory import predicted_profile
from clip_train.recipe.recipe import check_config
from clip_train.recipe.resolve import Resolved, resolve
from clip_train.step import train_step
from clip_train.task import Batch, text_lengths
from tests.data.shards import jpeg, write_shard
from tests.losses.oracle import siglip
from tests.losses.oracles import distill_loss
from tests.models.small import inputs, small_architecture, small_model
from tests.toy import columns_of

N, CONTEXT, T, M = 13, 24, 2, 1  # samples, tokens, positives, hard negatives
TEXT = {"context_length": CONTEXT, "vocab_size": 100, "width": 20, "heads": 2, "layers": 2}
META = {"syn": ["s0", "s1", "s2"], "neg": ["n0", "n1"]}
MEMBERS = {"txt": b"t", "json": json.dumps(META).encode()}
HALF = SEED_BOUND // 2
LR = 0.01


@pytest.mark.parametrize(
    "key, count, draw, expected",
    [
        (["txt", "json.syn"], 2, 0, "t s0"),
        (["nowhere", "txt", "syn"], 2, 4, "t s1"),
        (["txt", "nowhere"], 3, 5, "t t t"),  # too few: they repeat
        ("syn", 3, 1, "s1 s2 s0"),
        ("syn", 4, 2, "s2 s0 s1 s2"),
        (["txt", "syn"], 5, 4, "t s1 t s2 t"),
        ({"txt": 1, "syn": 1}, 2, HALF // 2, "t s2"),
        ({"txt": 1, "syn": 1}, 2, HALF + HALF // 2, "s0 t"),
        (["txt", "syn"], 1, 4, "t"),
    ],
)
def test_names_take_turns(key, count, draw, expected):
    texts = texts_of(MEMBERS, key, count, {"json.neg": 3}, draw)
    assert texts[:count] == expected.split()
    assert {*texts[count:]} == {"n0", "n1"} and texts[count] == texts[count + 2]


def lists(**texts: list[str]) -> dict[str, bytes]:
    return {"json": json.dumps(texts).encode()}


@pytest.mark.parametrize(
    ("key", "count", "negatives"),
    [("a", 1, {"b": 1}), (["a", "b"], 2, None), (["a"], 1, {"b": 1, "c": 1})],
)
def test_lists_are_drawn_from_independently(key, count, negatives):
    """All combinations of texts occur, equally often."""
    members = lists(a=["a0", "a1", "a2"], b=["b0", "b1", "b2"], c=["c0", "c1", "c2"])
    seeds = random.Random(0)
    found = Counter(
        tuple(texts_of(members, key, count, negatives, seeds.randrange(SEED_BOUND)))
        for _ in range(5400)
    )
    combinations = 3 ** (count + len(negatives or {}))
    assert len(found) == combinations
    expected = 5400 / combinations
    # five standard deviations of a count
    assert all(abs(each - expected) < 5 * expected**0.5 for each in found.values())


def test_a_single_list_is_drawn_from_as_ever():
    """The order of data is a promise: a run that resumes draws what it drew."""
    several = [f"s{i}" for i in range(5)]
    members = {"txt": b"t", **lists(a=several, one=["o"])}
    for draw in (0, 1, 7, SEED_BOUND - 3):
        place = draw % 5
        assert texts_of(members, "a", 2, None, draw) == [f"s{(place + i) % 5}" for i in (0, 1)]
        assert texts_of(members, "txt", 1, {"a": 1}, draw) == ["t", f"s{place}"]
        assert texts_of(members, ["txt", "a"], 2, {"one": 1}, draw) == ["t", f"s{place}", "o"]


def test_each_name_of_a_mapping_is_drawn_from_by_the_same_draw():
    """One caption for each visit: as before several lists had draws of their own."""
    members = lists(a=["a0", "a1", "a2"], b=["b0", "b1", "b2"])
    seeds = random.Random(1)
    for _ in range(50):
        draw = seeds.randrange(SEED_BOUND)
        name = "a" if draw < SEED_BOUND // 2 else "b"
        assert texts_of(members, {"a": 1, "b": 1}, seed=draw) == [f"{name}{draw % 3}"]


def test_a_sample_without_negatives_is_invalid():
    with pytest.raises(InvalidSample, match=r"data\.negative_texts\.json\.hard: no caption"):
        texts_of(MEMBERS, "txt", 1, {"json.hard": 1})


def words(texts):
    """A tokenizer: three numbers."""
    return torch.tensor([[int(word) for word in text.split()] for text in texts])


def batches(folder, ranks: int = 1, **options) -> list[list]:
    config = DataConfig(train=f"{folder}/*.tar", caption_key=["a", "b"], workers=0, **options)
    loaders = [
        TrainLoader(
            config, image_size=8, context_length=3, global_size=9, seed=7, rank=rank, world_size=ranks,
            tokenizer=words, lengths=None,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    out = [[each for loader in loaders for each in next(loader).texts.tolist()] for _ in range(3)]
    for loader in loaders:
        loader.close()
    return out


def test_a_batch_holds_them_whatever_the_ranks(tmp_path):
    members = []
    for i in range(12):
        meta = {"a": f"0 {i} 0", "b": [f"1 {i} {j}" for j in range(3)], "c": [f"2 {i} 0"]}
        members += [(f"{i}.jpg", jpeg(i)), (f"{i}.json", json.dumps(meta).encode())]
    write_shard(tmp_path / "0.tar", members)
    several = {"texts_per_image": 2, "negative_texts": {"c": 1}}
    whole, plain = batches(tmp_path, **several), batches(tmp_path)
    for step, alone in zip(whole, plain, strict=True):
        for (web, synthetic, negative), one in zip(step, alone, strict=True):
            assert web == one and [each[0] for each in (web, synthetic, negative)] == [0, 1, 2]
            assert web[1] == synthetic[1] == negative[1]
    assert len({each[1][2] for step in whole for each in step}) > 1  # of a list each is drawn
    assert batches(tmp_path, 2, **several) == whole


def whole_batch() -> Batch:
    """Texts of 3 to 23 tokens; the samples are not in the order of their lengths."""
    images, _, _ = inputs(N)
    lengths = torch.tensor([(5 * i * i) % 21 + 3 for i in range(N * (T + M))])
    texts = torch.randint(
        1, 99, (len(lengths), CONTEXT), generator=torch.Generator().manual_seed(2)
    )
    texts[torch.arange(len(lengths)), lengths - 1] = 99
    texts[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    texts = texts.view(N, T + M, CONTEXT)
    lengths = text_lengths(texts)
    return Batch(
        columns_of(images, texts, torch.arange(N) * 9, text_lengths=lengths), pack_texts=True
    )


def model(kind: str):
    bias = -3.0 if kind == "sigmoid" else None
    architecture = small_architecture(text_cfg=TEXT, init_logit_bias=bias)
    return small_model(dtype=torch.float64, architecture=architecture, dropout=0.3).train()


def teacher(batch):
    g = torch.Generator().manual_seed(5)
    image, text = torch.randn(N, 6, generator=g), torch.randn(N * T, 6, generator=g)
    image, text = (F.normalize(x.double(), dim=1) for x in (image, text))
    places = torch.div(batch.sample_seeds, 9, rounding_mode="floor")
    of_batch = {"image": image[places], "text": text.view(N, T, -1)[places].flatten(0, 1)}
    return {**of_batch, "logit_scale": torch.full((1,), 5.0).double()}


def textbook(kind, image, texts, scale, bias):
    """The mean over the positives; texts [N, T + M, D]."""
    own = torch.arange(N)
    losses = []
    for t in range(T):
        if kind == "negatives":
            columns = torch.cat([texts[:, t], texts[:, T:].flatten(0, 1)])
            rows = F.cross_entropy(scale * image @ columns.T, own)
            losses.append((rows + F.cross_entropy(scale * texts[:, t] @ image.T, own)) / 2)
        elif kind == "sigmoid":
            losses.append(siglip(image, texts[:, t], scale, bias))
        else:
            seen = teacher(whole_batch())
            of_teacher = (seen["image"], seen["text"].view(N, T, -1)[:, t], seen["logit_scale"])
            losses.append(sum(distill_loss(image, texts[:, t], scale, *of_teacher)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["negatives", "sigmoid", "distillation"])
def test_a_step_is_that_of_the_whole_batch(kind):
    """Also where a text's dropout is drawn, and whatever its length."""
    batch, clip = whole_batch(), model(kind)
    if kind != "negatives":
        texts = batch.texts[:, :T]
        batch.columns = batch.columns.plus(texts=texts, text_lengths=text_lengths(texts))
    seeds = batch.sample_seeds
    image = clip(batch.images, None, seeds)[0]
    texts = [clip(None, batch.texts[:, t], seeds + t)[1] for t in range(batch.texts.shape[1])]
    loss = textbook(kind, image, torch.stack(texts, 1), *clip(batch.images, None, seeds)[2:])
    loss.backward()
    expected = {name: p.grad for name, p in clip.named_parameters()}
    objective = LossConfig(kind="sigmoid" if kind == "sigmoid" else "info_nce").build((), T)
    if kind == "distillation":
        objective = over_texts(T, Distillation([teacher]))
    for micro_size in (N, 5, 2):
        subject = model(kind)
        before = {name: p.detach().clone() for name, p in subject.named_parameters()}
        engine = PlainEngine(subject, torch.optim.SGD(subject.parameters(), lr=LR))
        result = train_step(engine, batch, objective, micro_size=micro_size, kept_graphs=1, lr=LR)
        assert result.loss == pytest.approx(loss.item(), rel=1e-10)
        for name, p in subject.named_parameters():
            torch.testing.assert_close(
                (before[name] - p.detach()) / LR, expected[name], atol=1e-9, rtol=0
            )


def recipe(**sections):
    raw = {"run": {"steps": 9000}, "data": {"train": "x.tar"}, "model": {"name": "tiny"}}
    given = {key: {**raw.get(key, {}), **sections.get(key, {})} for key in {**raw, **sections}}
    return check_config(given, "recipe.yaml")


def test_memory_counts_every_text():
    graphs, architecture = [], small_architecture()
    for data in ({}, {"texts_per_image": 2}, {"texts_per_image": 2, "negative_texts": {"a": 3}}):
        config = recipe(engine={"precision": "fp32"}, data=data)
        resolved = Resolved(config, config, plan_batch(config.batch, 1), architecture)
        graphs.append(predicted_profile(resolved, False).graph)
    text = graphs[1] - graphs[0]
    assert text > 0 and graphs[2] == pytest.approx(graphs[0] + 4 * text, rel=1e-3)


NEGATIVES = {"negative_texts": {"json.n": 1}}


@pytest.mark.parametrize(
    "sections, said",
    [
        ({"loss": {"kind": "memory_bank"}}, r"texts_per_image \(2\).*memory_bank"),
        (
            {"loss": {"exchange": "ring"}, "data": NEGATIVES},
            r"negative_texts \({json.n: 1}\).*ring",
        ),
    ],
)
def test_a_loss_that_cannot_take_them_is_refused(sections, said):
    sections = {**sections, "data": {"texts_per_image": 2, **sections.get("data", {})}}
    with pytest.raises(UserError, match=said):
        resolve(recipe(**sections), 1, read_data=False)
