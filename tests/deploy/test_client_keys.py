"""Keys over their lives: passphrases, a CA elsewhere, replaced, revoked, out of date."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from cryptography import x509
from fake_grid import consortium  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.errors import ConfigError
from fedmll.deploy.flower import child_processes
from fedmll.deploy.flower.child_processes import find_free_port
from fedmll.deploy.security import certificates, client_keys, private_keys
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings

SECRET = "correct horse"


def write_private(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return path


def test_encrypted_key_needs_its_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = client_keys.create_client_key(tmp_path, "site-a", SECRET)
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_bytes()
    for wrong in (None, "wrong horse"):
        with pytest.raises(ValueError):
            private_keys.load_private_key(content, wrong)
    public = private_keys.load_private_key(content, SECRET).public_key()
    assert client_keys._public_pem(public).decode() == client_keys.load_public_keys(tmp_path, ["site-a"])["site-a"]
    with pytest.raises(ConfigError, match="there is no terminal"):
        private_keys.read_passphrase(file)
    monkeypatch.setenv(private_keys.PASSPHRASE, SECRET)
    assert private_keys.read_passphrase(file) == SECRET
    monkeypatch.setenv(private_keys.PASSPHRASE, "wrong")
    with pytest.raises(ConfigError, match="is wrong"):
        private_keys.read_passphrase(file)
    word = write_private(tmp_path / "word", f"{SECRET}\nmore\n")
    assert private_keys.read_passphrase(file, word) == SECRET  # the option takes precedence over the environment
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        private_keys.read_passphrase(file, tmp_path / "nothing")
    plain, _ = client_keys.create_client_key(tmp_path, "site-b")
    assert private_keys.read_passphrase(plain) is None
    assert private_keys.load_private_key(plain.read_bytes(), SECRET)  # one too many does no harm


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\nsecond line\n", b"\xff\xfe\n"])
def test_empty_passphrase_is_reported(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = client_keys.create_client_key(tmp_path, "site-a", SECRET)
    word = write_private(tmp_path / "word", content)
    with pytest.raises(ConfigError, match="is not a passphrase: it is empty or not text"):
        private_keys.read_passphrase(file, word)
    monkeypatch.setenv(private_keys.PASSPHRASE, "")
    with pytest.raises(ConfigError, match="FEDMLL_PASSPHRASE is not a passphrase"):
        private_keys.read_passphrase(file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o777])
def test_key_and_passphrase_file_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    plain, _ = client_keys.create_client_key(tmp_path, "site-a")
    encrypted, _ = client_keys.create_client_key(tmp_path, "site-b", SECRET)
    certificates.create_server_certificate(tmp_path, [])
    word = write_private(tmp_path / "word", f"{SECRET}\n")
    word.chmod(mode)
    with pytest.raises(ConfigError, match=f"word can be read by other users.*{mode:04o}.*chmod 600"):
        private_keys.read_passphrase(encrypted, word)
    for file in (plain, tmp_path / "ca.key"):
        file.chmod(mode)
    with pytest.raises(ConfigError, match=r"site-a\.key can be read by other users"):
        private_keys.read_passphrase(plain)
    with pytest.raises(ConfigError, match=r"site-a\.key can be read by other users"):
        client_keys.private_key_fingerprint(plain)
    with pytest.raises(ConfigError, match=r"ca\.key can be read by other users"):
        certificates.create_server_certificate(tmp_path, [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to root")
def test_group_may_read_a_key_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts a secret for a group in this way, and cannot do it otherwise."""
    file, _ = client_keys.create_client_key(tmp_path, "site-a")
    monkeypatch.setattr(private_keys.os, "getuid", lambda: 1000)
    file.chmod(0o440)
    private_keys.check_private_file(file)
    file.chmod(0o460)
    with pytest.raises(ConfigError, match="can be read by other users"):
        private_keys.check_private_file(file)


def test_server_does_not_start_with_a_key_that_others_can_read(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    keys = shutil.copytree(consortium.keys, tmp_path / "keys")
    (keys / "server.key").chmod(0o644)
    settings = ServerSettings(clients=("site-a", "site-b"), host="127.0.0.1", port=find_free_port(), keys=str(keys))
    with pytest.raises(ConfigError, match=r"server\.key can be read by other users"):
        serve.serve(consortium.server(), settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_passphrase_does_not_reach_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(private_keys.PASSPHRASE, SECRET)
    secret = child_processes.write_secret(tmp_path)
    settings = child_processes.SuperNodeSettings(
        server="127.0.0.1:1", port=1, folder=str(tmp_path), secret_file=str(secret), patience=1
    )
    child = child_processes.ChildProcess("supernode", settings)
    try:
        environment = b""
        while not child.has_ended() and b"FLWR_HOME=" not in environment:  # it is empty until the program is loaded
            environment = Path(f"/proc/{child.process.pid}/environ").read_bytes()
    finally:
        child.stop()
    assert b"FLWR_HOME=" in environment
    assert SECRET.encode() not in environment


def test_second_rotation_keeps_the_registered_key(tmp_path: Path) -> None:
    file, _ = client_keys.create_client_key(tmp_path, "site-a")
    registered = file.read_bytes()
    client_keys.rotate_client_key(tmp_path, "site-a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"site-a\.key\.old exists.*delete site-a\.key\.old and site-a\.pub\.old"):
        client_keys.rotate_client_key(tmp_path, "site-a")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert before["site-a.key.old"] == registered


DAMAGED = [b"", b"\n", b"\0" * 40, b"\xff\xfe", b"GARBAGE\n", b"<html>\n", None]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_list_of_revoked_keys_admits_nobody(tmp_path: Path, damage: bytes | None) -> None:
    client_keys.create_client_key(tmp_path, "site-a")
    client_keys.create_client_key(tmp_path, "site-b")
    client_keys.revoke_client_key(tmp_path, "site-a")
    path = tmp_path / client_keys.REVOKED_FILE
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)  # None: its end is missing
    for name in ("site-a", "site-b"):
        with pytest.raises(ConfigError, match="is damaged, so no client is accepted"):
            client_keys.load_public_keys(tmp_path, [name])
    with pytest.raises(ConfigError, match="is damaged"):
        client_keys.revoke_client_key(tmp_path, "site-b")  # what is left of it is not overwritten
    path.unlink()
    assert client_keys.load_public_keys(tmp_path, ["site-b"])


def test_short_new_passphrase_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(private_keys.PASSPHRASE, "short")
    assert private_keys.ask_passphrase("?") == "short"
    with pytest.raises(ConfigError, match="at least 8 characters"):
        private_keys.ask_passphrase("?", new=True)


def test_certificate_can_be_signed_on_another_machine(tmp_path: Path) -> None:
    server, ca = tmp_path / "server", tmp_path / "ca"
    certificates.create_ca(ca, SECRET)
    certificates.create_signing_request(server, ["fed.example.org", "10.0.0.7"], "server secret")
    with pytest.raises(ValueError):
        certificates.sign_request(ca, server / "server.csr")
    out = certificates.sign_request(ca, server / "server.csr", SECRET)
    (server / "ca.crt").write_bytes((ca / "ca.crt").read_bytes())
    assert out == server / "server.crt"
    assert not (server / "ca.key").exists()
    assert certificates.read_hosts(out) == ["fed.example.org", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    certificate, key, authority = certificates.find_tls_files(server)
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key, "server secret")  # they belong together
    with pytest.raises(ConfigError, match="If the CA is on another machine"):
        certificates.sign_request(server, server / "server.csr")
    (server / "server.csr").write_text("garbage")
    with pytest.raises(ConfigError, match="is not a request"):
        certificates.sign_request(ca, server / "server.csr", SECRET)


def test_expired_certificates_are_rejected_and_expiring_ones_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", 20)
    certificates.create_server_certificate(tmp_path, [])
    assert certificates.expiry_warnings(tmp_path) == ["server.crt expires in 19 days; renew it with `fedmll keys init`"]
    certificates.find_tls_files(tmp_path)
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    certificates.create_server_certificate(tmp_path, [])
    with pytest.raises(ConfigError, match=r"server.crt in .* has expired"):
        certificates.find_tls_files(tmp_path)
    (tmp_path / "server.crt").write_text("garbage")
    with pytest.raises(ConfigError, match="is not a certificate"):
        certificates.find_tls_files(tmp_path)


def test_revoked_key_is_rejected_and_its_successor_is_accepted(tmp_path: Path) -> None:
    at_server, at_site = tmp_path / "server", tmp_path / "site"
    _, public = client_keys.create_client_key(at_site, "site-a")
    at_server.mkdir()
    (at_server / "site-a.pub").write_bytes(public.read_bytes())
    before = client_keys.load_public_keys(at_server, ["site-a"])["site-a"]
    mark = client_keys.revoke_client_key(at_server, "site-a")
    assert client_keys.revoke_client_key(at_server, "site-a") == mark  # once is enough
    assert list(client_keys.read_revoked_keys(at_server / client_keys.REVOKED_FILE)) == [mark]
    with pytest.raises(ConfigError, match=r"The key of site-a was revoked on 20.*keys rotate site-a"):
        client_keys.load_public_keys(at_server, ["site-a"])
    old = (at_site / "site-a.key").read_bytes()
    private_file, public = client_keys.rotate_client_key(at_site, "site-a")
    assert (at_site / "site-a.key.old").read_bytes() == old != private_file.read_bytes()
    assert (at_site / "site-a.key.old").stat().st_mode & 0o777 == 0o600
    (at_server / "site-a.pub").write_bytes(public.read_bytes())
    assert client_keys.load_public_keys(at_server, ["site-a"])["site-a"] != before
    with pytest.raises(ConfigError, match="cannot be replaced"):
        client_keys.rotate_client_key(at_site, "site-b")


def test_key_commands_say_which_file_to_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str | Path) -> str:
        done = CliRunner().invoke(app, ["keys", *map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    monkeypatch.setenv(private_keys.PASSPHRASE, SECRET)
    ca, server, site = tmp_path / "ca", tmp_path / "server", tmp_path / "site"
    assert "send to the server and every client" in call("ca", "--dir", ca, "--passphrase")
    assert "take to the CA" in call("request", "--dir", server, "--host", "fed.example.org")
    assert "valid for: fed.example.org, localhost" in call("sign", server / "server.csr", "--dir", ca)
    assert "send to the server's operator" in call("new", "site-a", "--dir", site, "--passphrase")
    assert b"ENCRYPTED" in (site / "site-a.key").read_bytes()
    assert "next start or resume" in call("rotate", "site-a", "--dir", site)
    assert b"ENCRYPTED" not in (site / "site-a.key").read_bytes()  # not asked for
    (server / "site-a.pub").write_bytes((site / "site-a.pub").read_bytes())
    assert "revoked: the key of site-a" in call("revoke", "site-a", "--dir", server)
    shown = call("list", "--dir", server)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    mark = client_keys.fingerprint(client_keys._read_public_keys(server, ["site-a"])["site-a"].encode())
    assert f"site-a.pub │ {today} │ revoked {today} │ {mark}" in shown
    assert f"server.crt │ {today}" in shown or "server.crt" in shown
    both = call("init", "--dir", tmp_path / "both", "--host", "fed.example.org", "--passphrase")
    assert "valid for: fed.example.org" in both
    assert b"ENCRYPTED" in (tmp_path / "both" / "ca.key").read_bytes()
    call("init", "--dir", tmp_path / "both")  # a new certificate by the same CA, whose passphrase is found


def test_keys_are_private_and_the_certificate_names_the_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    certificates.create_server_certificate(folder, ["fed.example.org", "10.0.0.7"])
    private, public = client_keys.create_client_key(folder, "hospital-a")
    for path in (folder / "ca.key", folder / "server.key", private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1", "::1"]
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    before = (folder / "ca.crt").read_bytes(), (folder / "server.crt").read_bytes()
    certificates.create_server_certificate(
        folder, ["other.example.org"]
    )  # another host: a new certificate of the same CA
    assert (folder / "ca.crt").read_bytes() == before[0]
    assert (folder / "server.crt").read_bytes() != before[1]
    with pytest.raises(ConfigError, match="already exists; nothing was changed"):
        client_keys.create_client_key(folder, "hospital-a")
    assert public.read_text().endswith(client_keys.load_public_keys(folder, ["hospital-a"])["hospital-a"])


def test_two_clients_cannot_have_the_same_key(tmp_path: Path) -> None:
    client_keys.create_client_key(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"does not contain the public key of b: put b\.pub there"):
        client_keys.load_public_keys(tmp_path, ["a", "b"])
    (tmp_path / "b.pub").write_bytes((tmp_path / "a.pub").read_bytes())
    with pytest.raises(ConfigError, match="a and b have the same public key"):
        client_keys.load_public_keys(tmp_path, ["a", "b"])
    (tmp_path / "b.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"b\.pub is not a public key"):
        client_keys.load_public_keys(tmp_path, ["a", "b"])
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        client_keys.create_client_key(tmp_path, "../etc")
