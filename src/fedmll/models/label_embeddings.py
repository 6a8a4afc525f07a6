"""Label embeddings from text: a frozen text encoder embeds one sentence per class, the same at each client.

Embeddings are cached under a key of the encoder's files and the texts, so an encoder runs only once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.data.images.cache import cache_folder, content_key
from fedmll.models.class_attention import orthonormal
from fedmll.models.ctran import LabelEmbeddings
from fedmll.models.text_encoders import Vectors, find_encoder

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
    except (OSError, ValueError) as error:
        raise ConfigError(f"method.encoder: '{path}' cannot be read ({error}); it must be an .npz file.") from None
    missing: list[str] = list(classes)
    for key in [name for name in arrays if f"{name}_names" in arrays]:
        place = {str(name).strip().lower(): row for row, name in enumerate(arrays[f"{key}_names"])}
        missing = min(missing, [name for name in classes if name.strip().lower() not in place], key=len)
        if not missing:
            vectors = _unit(arrays[key].astype(np.float64))
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
    vectors = _unit(found.run(texts))
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
