"""The small models: same recipe, same bytes; loadable by the reference library; clear gaps."""

from pathlib import Path

import pytest
import torch

from rose_dev.models import RECIPES, make_model, make_named, successors


def test_the_same_recipe_makes_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_model(RECIPES["tiny"], tmp_path / name) for name in "ab")
    assert first.name == second.name
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert make_model(RECIPES["tiny"], tmp_path / "a") == first
    assert len({make_model(recipe, tmp_path / "c").name for recipe in RECIPES.values()}) == 5


@pytest.mark.parametrize("name", ["tiny", "tiny-tied"])
def test_transformers_loads_a_made_model_whose_tokens_are_bytes(tmp_path: Path, name: str) -> None:
    folder = make_named(name, tmp_path)
    import transformers  # noqa: PLC0415  # seconds, which each worker of a lane would spend

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 400_000
    text = "Grüße, 3 + 4\n"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize("name", ["tiny-peaked", "mid-peaked"])
def test_peaked_models_have_clear_gaps(tmp_path: Path, name: str) -> None:
    import transformers  # noqa: PLC0415  # as above

    model = transformers.AutoModelForCausalLM.from_pretrained(
        make_named(name, tmp_path), dtype=torch.float32
    )
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    best = logits.topk(2, -1).values
    assert float((best[..., 0] - best[..., 1]).min()) > 2.0
    following = torch.tensor(successors(RECIPES[name]))
    assert torch.equal(logits.argmax(-1), following[ids])


def test_successors_form_one_cycle() -> None:
    following = successors(RECIPES["tiny-peaked"])
    seen = []
    token = 0
    while token not in seen:
        seen.append(token)
        token = following[token]
    assert token == 0
    assert sorted(seen) == list(range(256))
