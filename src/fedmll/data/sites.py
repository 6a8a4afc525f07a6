"""The data of `[[sites]]`: several sources with different label sets, joined to one federation.

Each site's names are mapped onto the classes of the study (`rename`). What a site does not annotate is unknown there,
except where one of its labels excludes it by definition (`excludes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.config.settings import COMPOSITE, SITES, DataSettings, SiteSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.registry import register
from fedmll.core.seeding import derive, numpy_generator
from fedmll.core.text import letters, suggest
from fedmll.data import sources
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset, Splits
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.joined_store import JoinedStore
from fedmll.data.partition import Partition, PartitionRequest, rule_counts
from fedmll.data.targets import check_positives

NAMED = 8  # classes in a message


def load_sites(experiment: Experiment, progress: Progress = no_progress) -> Splits:
    """Load the data of all sites with the classes of the study; `Dataset.sites` says where a sample comes from."""
    assert experiment.sites is not None
    _check_different_data(experiment)
    loaded = {site.name: _load_site(experiment, site, progress) for site in experiment.sites}
    notes = [f"site {name}: {note}" for name, splits in loaded.items() for note in splits.notes]
    loaded, added = _use_validation_data(loaded)
    notes += added
    chosen = () if experiment.study is None else experiment.study.classes
    classes = _find_classes(experiment.sites, loaded, chosen)
    parts: dict[str, list[Dataset]] = {"train": [], "validation": [], "test": []}
    for site in experiment.sites:
        splits = loaded[site.name]
        columns = _columns_by_class(site, splits.train.classes)
        left_out = [name for target, own in columns.items() if target not in classes for name in own]
        if left_out:
            notes.append(f"site {site.name}: classes that the study does not have are left out: {_some(left_out)}")
        for part, samples in parts.items():
            data: Dataset | None = getattr(splits, part)
            if data is not None:
                names = np.full(len(data), site.name)
                samples.append(replace(data, labels=_map_labels(site, data, columns, classes), sites=names,
                                       classes=classes))  # fmt: skip
    store, notes_of_images = _join_stores(experiment, parts)
    train = _join("train", parts["train"], store)
    check_positives(train, "[[sites]]")
    windows = {splits.window for splits in loaded.values()}
    return Splits(
        train,
        _join("test", parts["test"], store),
        _join("validation", parts["validation"], store) if parts["validation"] else None,
        size=loaded[experiment.sites[0].name].size,
        window=windows.pop() if len(windows) == 1 else None,
        notes=(*notes, *notes_of_images),
    )


def _load_site(experiment: Experiment, site: SiteSettings, progress: Progress) -> Splits:
    data = experiment.data
    reading = replace(site.reading, skip_unreadable=site.skip_unreadable or data.skip_unreadable)
    composition = data.composition if site.data.startswith(COMPOSITE) else None
    root = find_root(site, data)
    try:
        if root is not None and not root.exists():
            raise DataError(f"'{root}' does not exist. Correct its root, or the folder of all sites (--root).")
        splits = sources.load(
            site.data, root, data.size, experiment.seed, composition, progress, reading, require_positives=False
        )
    except (ConfigError, DataError) as error:
        raise type(error)(f"[[sites]] '{site.name}': {error}") from error
    if splits.encoding is not None:
        raise ConfigError(
            f"[[sites]] '{site.name}': a table's columns become numbers by its own rows, so two tables are not "
            "comparable. Put all rows into one table with a column `client`; blank labels are unknown."
        )
    if site.limit is not None and site.limit < len(splits.train):
        drawn = numpy_generator(experiment.seed, "limit", site.name).permutation(len(splits.train))[: site.limit]
        splits = replace(splits, train=splits.train.subset(np.sort(drawn)))
    return splits


def _check_different_data(experiment: Experiment) -> None:
    """The same samples at two sites would be training data of one and test data of another."""
    seen: dict[tuple[str, Path | None], str] = {}
    for site in experiment.sites or ():
        other = seen.setdefault((site.data, find_root(site, experiment.data)), site.name)
        if other != site.name:
            raise ConfigError(
                f"[[sites]]: '{other}' and '{site.name}' read the same data ({site.label}). Change one of them, or "
                "divide one site among several clients ([sites.partition])."
            )


def find_root(site: SiteSettings, data: DataSettings) -> Path | None:
    """The folder of a site's data: its root, relative to data.root."""
    if site.root is None or data.root is None:
        return site.root or data.root
    return data.root / site.root.expanduser()


def _use_validation_data(loaded: Mapping[str, Splits]) -> tuple[dict[str, Splits], list[str]]:
    """Validation data is used as such if all sites have some; otherwise it is training data, and clients hold out."""
    having = [name for name, splits in loaded.items() if splits.validation is not None]
    if len(having) == len(loaded):
        return dict(loaded), []
    notes = [
        f"site {name}: its validation data is used for training, because other sites have none (each client holds out "
        "partition.holdout)"
        for name in having
    ]
    found = {}
    for name, splits in loaded.items():
        if splits.validation is not None:
            parts = [splits.train, splits.validation]
            splits = replace(splits, train=_join("train", parts, _one_store(parts)), validation=None)
        found[name] = splits
    return found, notes


def _one_store(parts: Sequence[Dataset]) -> dict[int, tuple[JoinedStore, int]]:
    stores = list({id(part.store): part.store for part in parts}.values())
    channels = stores[0].shape[1] if parts[0].is_images else None
    joined = JoinedStore(stores, channels)
    return {id(store): (joined, int(start)) for store, start in zip(stores, joined.starts, strict=False)}


# Classes


def _columns_by_class(site: SiteSettings, own: Sequence[str]) -> dict[str, list[str]]:
    """Class of the study → the site's names of it."""
    nothing = _name_of_nothing(site)
    known = [*own, *([nothing] if nothing else [])]
    for setting, given in (("rename", [*site.rename]), ("excludes", [*site.excludes])):
        wrong = next((name for name in given if name not in known), None)
        if wrong is not None:
            raise ConfigError(
                f"[[sites]] '{site.name}': {setting} names the class '{wrong}', which {site.data} does not have"
                f"{suggest(wrong, known)}"
            )
    columns: dict[str, list[str]] = {}
    for name in known:
        if name in own or name in site.rename:
            columns.setdefault(site.rename.get(name, name), []).append(name)
    for target, names in columns.items():
        if target in names and len(names) > 1 and target not in site.rename:
            other = next(name for name in names if name != target)
            raise ConfigError(
                f"[[sites]] '{site.name}': rename makes '{other}' the class '{target}', and {site.data} has a class "
                f"'{target}' of its own. Rename that one too: to another name, or with '{target}' = '{target}' to join "
                "both."
            )
    return columns


def _name_of_nothing(site: SiteSettings) -> str:
    source = registry.all_of("source").get(site.source)
    return "" if source is None else str(source.nothing)


def _find_classes(
    sites: Sequence[SiteSettings], loaded: Mapping[str, Splits], chosen: tuple[str, ...]
) -> tuple[str, ...]:
    """The classes of the study: the chosen ones, or all of all sites in the order in which they are found."""
    by_site = {site.name: _columns_by_class(site, loaded[site.name].train.classes) for site in sites}
    found = tuple(dict.fromkeys(name for columns in by_site.values() for name in columns))
    classes = chosen or found
    for site in sites:
        wrong = next((target for target in site.rename.values() if target not in classes), None)
        if wrong is not None:
            raise ConfigError(
                f"[[sites]] '{site.name}': rename uses the class '{wrong}', which study.classes does not have"
                f"{suggest(wrong, classes)}"
            )
    missing = next((name for name in classes if name not in found), None)
    if missing is not None:
        raise ConfigError(f"study.classes names '{missing}', which no site has{suggest(missing, found)}")
    spelt: dict[str, str] = {}
    for name in classes:
        other = spelt.setdefault(letters(name), name)
        if other != name:
            raise ConfigError(
                f"[[sites]]: the classes '{other}' and '{name}' differ only in their spelling. Give both one name with "
                "rename."
            )
    for site in sites:
        listed = [name for names in site.excludes.values() if names != "all" for name in names]
        wrong = next((name for name in listed if name not in classes), None)
        if wrong is not None:
            raise ConfigError(
                f"[[sites]] '{site.name}': excludes lists '{wrong}', which is not a class of the study"
                f"{suggest(wrong, classes)}"
            )
        if not by_site[site.name].keys() & set(classes):
            raise ConfigError(
                f"[[sites]] '{site.name}': none of its classes is in study.classes. Map its names with rename; it has "
                f"{_some(loaded[site.name].train.classes)}."
            )
    return classes


def _map_labels(
    site: SiteSettings, data: Dataset, columns: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> NDArray[np.int8]:
    """The targets (N, C) for the classes of the study; classes that the site does not annotate are unknown."""
    own = {name: data.labels[:, place] for place, name in enumerate(data.classes)}
    nothing = _name_of_nothing(site)
    if nothing and (nothing in site.rename or nothing in site.excludes):
        own[nothing] = _absence(data.labels)
    mapped = np.full((len(data), len(classes)), UNKNOWN, np.int8)
    for place, name in enumerate(classes):
        if name in columns:
            mapped[:, place] = _any_of(np.stack([own[each] for each in columns[name]]))
    for name, excluded in site.excludes.items():
        places = [classes.index(each) for each in (classes if excluded == "all" else excluded)]
        others = np.array([place for place in places if name not in columns.get(classes[place], ())], np.int64)
        cells = np.ix_(np.flatnonzero(own[name] == PRESENT), others)
        mapped[cells] = np.where(mapped[cells] == UNKNOWN, ABSENT, mapped[cells])
    return mapped


def _absence(labels: NDArray[np.int8]) -> NDArray[np.int8]:
    """Whether a sample has none of the classes: present, absent or unknown."""
    return np.where((labels == PRESENT).any(1), ABSENT, np.where((labels == ABSENT).all(1), PRESENT, UNKNOWN)).astype(
        np.int8
    )


def _any_of(labels: NDArray[np.int8]) -> NDArray[np.int8]:
    """(names, N) → (N,): present if one of the names is, absent if all of them are, otherwise unknown."""
    return np.where((labels == PRESENT).any(0), PRESENT, np.where((labels == ABSENT).all(0), ABSENT, UNKNOWN)).astype(
        np.int8
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# Samples


def _join_stores(
    experiment: Experiment, parts: Mapping[str, Sequence[Dataset]]
) -> tuple[dict[int, tuple[JoinedStore, int]], list[str]]:
    """id of a store → the joined store and the position of its first sample; and notes."""
    every = [data for samples in parts.values() for data in samples]
    shapes: dict[str, tuple[int, ...]] = {}
    for data in every:
        assert data.sites is not None
        shapes.setdefault(str(data.sites[0]), data.sample_shape)
    kinds = {len(shape) for shape in shapes.values()}
    sizes = {shape[1:] if len(shape) == 3 else shape for shape in shapes.values()}
    if len(kinds) > 1 or len(sizes) > 1:
        listed = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in shapes.items())
        advice = "Set data.size, to which all images are resized." if kinds == {3} else "All sites need the same kind."
        raise ConfigError(f"[[sites]]: the samples of the sites have different shapes ({listed}). {advice}")
    channels, notes = None, list[str]()
    if kinds == {3}:
        study = experiment.study
        wanted = None if study is None else study.channels
        channels = wanted or max(shape[0] for shape in shapes.values())
        before, after = ("grey", "colour") if channels == 3 else ("colour", "grey")
        notes = [
            f"site {name}: {before} images are used as {after} images (study.channels = {channels})"
            for name, shape in shapes.items()
            if shape[0] != channels
        ]
    stores = list({id(data.store): data.store for data in every}.values())
    joined = JoinedStore(stores, channels)
    return {id(store): (joined, int(start)) for store, start in zip(stores, joined.starts, strict=False)}, notes


def _join(part: str, samples: Sequence[Dataset], stores: Mapping[int, tuple[JoinedStore, int]]) -> Dataset:
    """One dataset after the other. A sample without a patient is a patient of its own."""
    joined = next(iter(stores.values()))[0]
    rows = np.concatenate([data.rows + stores[id(data.store)][1] for data in samples])
    patients = clients = files = None
    if any(data.patients is not None for data in samples):
        patients = np.concatenate([_patients(part, data) for data in samples])
    if any(data.groups is not None for data in samples):
        clients = np.concatenate([np.full(len(data), "") if data.groups is None else data.groups for data in samples])
    if any(data.files is not None for data in samples):
        names = {id(data.store): data.files for data in samples}
        files = np.concatenate(
            [np.full(len(store), "") if names.get(id(store)) is None else names[id(store)] for store in joined.parts]
        )
    sites = [data.sites for data in samples if data.sites is not None]
    return Dataset(
        joined,  # type: ignore[arg-type]
        np.concatenate([data.labels for data in samples]),
        samples[0].classes,
        rows,
        clients,
        patients,
        files=files,
        sites=np.concatenate(sites) if sites else None,
    )


def _patients(part: str, data: Dataset) -> NDArray[np.str_]:
    """Names that are different at different sites."""
    site = "" if data.sites is None else str(data.sites[0])
    own = [f"{part} {row}" for row in data.rows] if data.patients is None else data.patients.tolist()
    return np.array([f"{site}/{name}" if site else name for name in own], dtype=np.str_)


# The clients of a site


@register("partition", SITES)
def _only_with_sites(request: PartitionRequest) -> Partition:
    raise ConfigError("partition.kind = 'sites' is for experiments with [[sites]]. Choose another kind.")


def site_seed(seed: int, name: str) -> int:
    return derive(seed, "site", name)


def join_partitions(
    labels: NDArray[np.int8], parts: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64], Partition]]
) -> Partition:
    """The partition of all sites.

    Args:
        labels: the targets (N, C) of all training samples.
        parts: site → its samples, the classes that it annotates, and the partition of these samples and classes.
    """
    after = labels.copy()
    clients, names, allowed, report = [], [], [], rule_counts()
    for site, (rows, columns, own) in parts.items():
        after[np.ix_(rows, columns)] = own.labels
        clients += [rows[positions] for positions in own.clients]
        names += [site] if len(own.clients) == 1 else [f"{site}-{name}" for name in own.names]
        may = np.ones((len(own.clients), labels.shape[1]), dtype=bool)
        may[:, columns] = own.allowed
        allowed.append(may)
        report = {rule: count + own.report[rule] for rule, count in report.items()}
    return Partition(
        clients=tuple(clients), names=tuple(names), allowed=np.concatenate(allowed), labels=after, report=report
    )
