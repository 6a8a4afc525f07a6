"""`fedmll check`: all problems that would keep a site from joining, before it joins."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.config.experiment import Experiment
from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.deploy.experiment_for_sites import build_setup, resolve_for_sites
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.server.default_average import with_default_average
from fedmll.deploy.server.serve import study_digest
from fedmll.deploy.site import check
from fedmll.deploy.site.check import SiteCheck, check_site
from fedmll.deploy.site.server_access import ServerAccess
from fedmll.deploy.site.site_config import Site, read_site_file, write_site_file
from fedmll.deploy.site.site_data import load_site_data, read_site_labels

ROWS = ["1,0,1", "0,1,0", "1,1,", "0,0,1", "0,1,0", "1,0,1"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Six images, three classes; nothing is wrong."""
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    lines = ["image,Mass,Effusion,Nodule"]
    for number, labels in enumerate(ROWS):
        Image.fromarray(generator.integers(0, 256, (9, 9), dtype=np.uint8)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{labels}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return Site(name="site-a", csv=tmp_path / "labels.csv", images=folder, state_dir=tmp_path / "memory")


def rewrite(site: Site, change: dict[str, str]) -> None:
    text = site.csv.read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    site.csv.write_text(text)


def make_study(*classes: str, **more: object) -> Experiment:
    return Experiment.make({"data": {"name": "none", "size": 32}, "study": {"classes": classes, **more}})


def results_for(found: SiteCheck, topic: str) -> list[tuple[str, str]]:
    return [(result.level, result.text) for result in found.results if result.topic == topic]


def test_site_without_problems(site: Site) -> None:
    found = check_site(site, make_study("Mass", "Effusion", "Nodule"))
    assert found.errors == 0
    assert [result.level for result in found.results] == ["ok"] * len(found.results)
    assert {result.topic for result in found.results} == {"version", "data", "classes", "disk", "study"}
    assert found.summary is not None
    assert found.summary.images == 6


def test_digest_of_a_study_is_computed_from_its_file(site: Site) -> None:
    wanted = make_study("Mass", "Effusion", "Nodule")
    ((level, text),) = results_for(check_site(site, wanted, clients=3), "study")
    digest = study_digest(wanted, 3)
    assert (level, text) == ("ok", f"its digest is {digest}; `fedmll join --approve` takes it")
    shape = (3, 32, 32)
    resolved = resolve_for_sites(with_default_average(wanted, 3), shape)
    assert build_setup(resolved, ("Mass", "Effusion", "Nodule"), shape, 3).digest == digest
    others = [wanted.changed({"partition.holdout": 0.3}), wanted.changed({"training.rounds": 9}), make_study("Mass")]
    assert len({digest, study_digest(wanted, 2), *(study_digest(each, 3) for each in others)}) == 5
    assert "with --clients N" in results_for(check_site(site, wanted), "study")[0][1]
    own = wanted.changed({"data.name": f"folder:{site.csv}"})
    assert "come from the server's own data" in results_for(check_site(site, own, clients=3), "study")[0][1]
    ((level, text),) = results_for(
        check_site(site, wanted.changed({"model.weights": "/no/such.pth"}), clients=3), "study"
    )
    assert level == "warning" and "cannot be computed here" in text


def test_spellings_are_recognised(site: Site) -> None:
    found = check_site(site, make_study("Mass", "pleural effusion", "EFFUSION", "Nodules", "nodule_"))
    texts = [text for _, text in results_for(found, "classes")]
    assert "'Effusion' is not a class of the study; did you mean 'EFFUSION'?" in texts[0]
    assert "'Nodule' is not a class of the study; did you mean 'nodule_'?" in texts[1]


def test_all_problems_at_once(site: Site) -> None:
    rewrite(site, {"Nodule": "Nodul", "3.png,0,0,1": "3.png,2,0,1"})
    (site.images / "5.png").write_bytes(b"no image")
    shutil.copy(site.images / "0.png", site.images / "1.png")
    found = check_site(site, make_study("Mass", "Effusion", "Nodule", "Hernia"))
    ((level, text),) = results_for(found, "data")
    assert level == "error"
    assert "'2'" in text
    assert "5.png" in text
    assert found.summary is None
    names = results_for(found, "classes")
    assert names[0][0] == "error"
    assert "did you mean 'Nodule'?" in names[0][1]
    assert names[1] == ("warning", "not annotated here, so unknown: Nodule, Hernia")
    assert "'1.png' is '0.png'" in results_for(found, "images")[0][1]
    assert found.errors == 2


@pytest.mark.parametrize(
    ("column", "level", "words"),
    [
        (["1", "", "1", "", "1", ""], "error", "but no 0"),
        ([""] * 6, "warning", "blank in every row"),
        (["0", "0", "", "0", "0", "0"], "warning", "absent wherever it is known"),
        (["1"] * 6, "warning", "present wherever it is known"),
        (["1", "0", "1", "0", "0", "1"], "warning", "'Nodule' and 'Mass' have the same labels"),
    ],
)
def test_columns(site: Site, column: list[str], level: str, words: str) -> None:
    lines = site.csv.read_text().splitlines()
    changed = [f"{line.rsplit(',', 1)[0]},{value}" for line, value in zip(lines[1:], column, strict=True)]
    site.csv.write_text("\n".join([lines[0], *changed]) + "\n")
    ((found, text),) = results_for(check_site(site), "labels")
    assert found == level
    assert words in text


def test_copies_across_the_split_are_errors(site: Site) -> None:
    lines = site.csv.read_text().splitlines()
    parts = ["split", "train", "test", "train", "test", "train", "train"]
    site.csv.write_text("\n".join(f"{line},{part}" for line, part in zip(lines, parts, strict=True)) + "\n")
    for number in (1, 2):
        shutil.copy(site.images / "0.png", site.images / f"{number}.png")
    found = dict(results_for(check_site(site), "images"))
    assert "1 images are also on the other side" in found["error"]
    assert "'1.png' is '0.png'" in found["error"]
    assert "'2.png' is '0.png'" in found["warning"]


def test_patients(site: Site) -> None:
    lines = site.csv.read_text().splitlines()
    who = ["patient_id", "p1", "p1", "p2", "p2", "p3", "p3"]
    site.csv.write_text("\n".join(f"{line},{name}" for line, name in zip(lines, who, strict=True)) + "\n")
    grouped = Site(
        name=site.name,
        csv=site.csv,
        images=site.images,
        state_dir=site.state_dir,
        reading=ReadingOptions(group="patient_id"),
    )
    ((level, text),) = results_for(check_site(grouped), "patients")
    assert (level, text[:1]) == ("ok", "3")
    ignored = Site(
        name=site.name,
        csv=site.csv,
        images=site.images,
        state_dir=site.state_dir,
        reading=ReadingOptions(ignore=("patient_id",)),
    )
    ((level, text),) = results_for(check_site(ignored), "patients")
    assert level == "warning"
    assert "--group patient_id" in text


def test_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 200_000_000 + 6 * 3 * 32 * 32})()
    monkeypatch.setattr(check.shutil, "disk_usage", lambda path: usage)
    wanted = make_study("Mass", "Effusion", "Nodule")
    assert results_for(check_site(site, wanted), "disk")[0][0] == "error"
    usage.free += 1
    assert results_for(check_site(site, wanted), "disk")[0][0] == "ok"
    assert results_for(check_site(site), "disk")[0][0] == "error"  # 224 pixels


def test_renamed_classes(site: Site) -> None:
    renamed = Site(
        name=site.name,
        csv=site.csv,
        images=site.images,
        state_dir=site.state_dir,
        class_renames=(("Nodule", "Lung nodule"),),
    )
    assert check_site(renamed, make_study("Mass", "Effusion", "Lung nodule")).errors == 0
    data = load_site_data(renamed, ("Lung nodule", "Mass", "Effusion"), (1, 9, 9), 0, 0.0)
    assert data.train.labels[:, 0].tolist() == [1, 0, -1, 1, 0, 1]
    write_site_file(renamed, site.state_dir.with_name("site.json"))
    assert read_site_file(site.state_dir.with_name("site.json")).class_renames == renamed.class_renames
    for rename, words in (((("Nodul", "x"),), "did you mean 'Nodule'"), ((("Mass", "Nodule"),), "two columns")):
        with pytest.raises(DataError, match=words):
            read_site_labels(
                Site(name=site.name, csv=site.csv, images=site.images, state_dir=site.state_dir, class_renames=rename)
            )


class Late(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response_only(404)
        self.send_header("Date", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_keys_server_and_clock(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    certificates.create_server_certificate(folder, ["localhost"])
    private, _ = client_keys.create_client_key(folder, "site-a")
    server = HTTPServer(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        found = check_site(site, access=ServerAccess(server=address, ca=None, key=private, patience=0))
        assert results_for(found, "server") == [("ok", f"{address} answers")]
        ((level, text),) = results_for(found, "clock")
        assert level == "error"
        assert "ahead of the server's" in text
        found = check_site(site, access=ServerAccess(server=address, ca=folder / "ca.crt", key=private, patience=0))
        assert "does not use TLS" in results_for(found, "server")[0][1]
        assert results_for(found, "keys")[0][0] == "ok"
    finally:
        server.shutdown()
        server.server_close()
    found = check_site(site, access=ServerAccess(server=address, ca=folder / "ca.crt", key=private, patience=0))
    assert "not reachable" in results_for(found, "server")[0][1]
    private.chmod(0o644)
    (tmp_path / "bad.key").write_text("no key")
    found = check_site(site, access=ServerAccess(server=address, ca=folder / "none.crt", key=private, patience=0))
    assert any(level == "error" and f"chmod 600 {private}" in text for level, text in results_for(found, "keys"))
    assert any("none.crt does not exist" in text for _, text in results_for(found, "keys"))
    assert not results_for(found, "server")
    (tmp_path / "bad.key").chmod(0o600)
    found = check_site(site, access=ServerAccess(server=address, ca=private, key=tmp_path / "bad.key", patience=0))
    assert [
        next(word for word in ("not a key", "not a certificate") if word in text)
        for _, text in results_for(found, "keys")
    ] == ["not a key", "not a certificate"]


def test_certificates_that_expire(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "keys"
    for days, level in ((0, "error"), (20, "warning"), (400, "ok")):
        monkeypatch.setattr("fedmll.deploy.security.certificates.CA_DAYS", days + 0.5)
        certificates.create_server_certificate(folder / str(days), ["localhost"])
        access = ServerAccess(server=free(), ca=folder / str(days) / "ca.crt", key=None, patience=0)
        assert results_for(check_site(site, access=access), "keys") == [(level, f"ca.crt expires in {days} days")]


def free() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


class TestCommand:
    def test_good(self, site: Site, tmp_path: Path) -> None:
        out = tmp_path / "check.json"
        done = CliRunner().invoke(
            app, ["check", "--csv", str(site.csv), "--images", str(site.images), "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        assert json.loads(out.read_text())["errors"] == 0

    def test_bad_from_settings_and_study(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "names.csv").write_text("own,study\nMass,mass\n")
        (tmp_path / "study.toml").write_text('[data]\nname = "none"\n[study]\nclasses = ["mass", "Nodule"]\n')
        (tmp_path / "site.toml").write_text(
            f'csv = "{site.csv}"\nimages = "{site.images}"\nrename = "{tmp_path / "names.csv"}"\n'
            f'state-dir = "{site.state_dir}"\nstudy = "{tmp_path / "study.toml"}"\nskip-unreadable = true\n'
        )
        done = CliRunner().invoke(app, ["check", "--settings", str(tmp_path / "site.toml")])
        assert done.exit_code == 1, done.output
        assert "'Effusion' is not a class of the study" in done.output
        assert "'Mass'" not in done.output
        done = CliRunner().invoke(app, ["check", "--settings", str(tmp_path / "site.toml"), "--ignore", "Effusion"])
        assert done.exit_code == 0, done.output

    def test_lists_in_settings(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "site.toml").write_text('ignore = ["Effusion", "Mass"]\n')
        given = ["check", "--csv", str(site.csv), "--images", str(site.images)]
        done = CliRunner().invoke(app, [*given, "--settings", str(tmp_path / "site.toml")])
        assert done.exit_code == 0, done.output
        assert "Nodule" in done.output
        assert "Effusion" not in done.output

    def test_unknown_setting(self, tmp_path: Path) -> None:
        (tmp_path / "site.toml").write_text("max-round = 3\n")
        done = CliRunner().invoke(app, ["join", "--settings", str(tmp_path / "site.toml")])
        assert done.exit_code != 0
        assert "did you mean 'max-rounds'?" in str(done.exception) + done.output

    def test_invalid_rename_files(self, site: Site, tmp_path: Path) -> None:
        (tmp_path / "names.csv").write_text("local;study\n")
        (tmp_path / "broken.csv").write_text("own,study\nMass\n")
        for name in ("names.csv", "broken.csv", "none.csv"):
            done = CliRunner().invoke(
                app,
                ["check", "--csv", str(site.csv), "--images", str(site.images), "--rename", str(tmp_path / name)],
            )
            assert "columns own and study" in str(done.exception) + done.output


def test_join_reports_all_problems_and_stops(site: Site, tmp_path: Path) -> None:
    """Before it connects: there is no server."""
    rewrite(site, {"3.png,0,0,1": "3.png,2,0,1"})
    first, *lines = site.csv.read_text().splitlines()
    more = [f"{line},{number % 2 or ''}" for number, line in enumerate(lines)]
    site.csv.write_text("\n".join([f"{first},Mass 2", *more]))
    shutil.copy(site.images / "0.png", site.images / "1.png")
    words = ["join", "localhost:1", "--name", "site-a", "--csv", str(site.csv), "--images", str(site.images)]
    done = CliRunner().invoke(app, [*words, "--ca", str(tmp_path / "ca.crt"), "--state-dir", str(site.state_dir)])
    assert isinstance(done.exception, DataError)
    problems = str(done.exception).splitlines()
    assert len(problems) >= 4
    assert any("'2'" in problem for problem in problems)
    assert any("'Mass 2' has ones and blanks, but no 0" in problem for problem in problems)
    assert any("ca.crt does not exist (--ca)" in problem for problem in problems)
    assert any("site-a.key does not exist (--key)" in problem for problem in problems)
    assert "warning: 1 images are copies of others" in " ".join(done.output.split())


def test_whole_command_of_join_from_a_file(site: Site, tmp_path: Path) -> None:
    """A service has one short line: everything else is in the file, also the server's address."""
    (tmp_path / "site.toml").write_text(
        f'server = "{free()}"\nname = "site-a"\ncsv = "{site.csv}"\nimages = "{site.images}"\ninsecure = true\n'
        f'state-dir = "{site.state_dir}"\npatience = 0\napprove = "{"0" * 64}"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "fedmll", "join", "--settings", str(tmp_path / "site.toml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "is not reachable" in done.stderr
