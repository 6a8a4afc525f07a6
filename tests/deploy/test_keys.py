"""Keys over their lives: passphrases, a CA elsewhere, replaced, revoked, out of date."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.deploy import certificates, keys, private
from fedmll.errors import ConfigError

SECRET = "correct horse"


def test_a_key_with_a_passphrase_is_of_no_use_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = keys.new_node(tmp_path, "site-a", SECRET)
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_bytes()
    for wrong in (None, "wrong horse"):
        with pytest.raises(ValueError):
            private.private_key(content, wrong)
    public = private.private_key(content, SECRET).public_key()
    assert keys._public_pem(public).decode() == keys.registered(tmp_path, ["site-a"])["site-a"]
    with pytest.raises(ConfigError, match="nobody is there to type it"):
        private.passphrase_of(file)
    monkeypatch.setenv(private.PASSPHRASE, SECRET)
    assert private.passphrase_of(file) == SECRET
    monkeypatch.setenv(private.PASSPHRASE, "wrong")
    with pytest.raises(ConfigError, match="not the passphrase of"):
        private.passphrase_of(file)
    (tmp_path / "word").write_text(f"{SECRET}\nmore\n")
    assert private.passphrase_of(file, tmp_path / "word") == SECRET  # said is said: before the environment
    with pytest.raises(ConfigError, match="holds no passphrase"):
        private.passphrase_of(file, tmp_path / "nothing")
    plain, _ = keys.new_node(tmp_path, "site-b")
    assert private.passphrase_of(plain) is None
    assert private.private_key(plain.read_bytes(), SECRET)  # one too many does no harm


def test_a_new_passphrase_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(private.PASSPHRASE, "short")
    assert private.ask_passphrase("?") == "short"
    with pytest.raises(ConfigError, match="8 characters or more"):
        private.ask_passphrase("?", new=True)


def test_the_ca_may_be_elsewhere(tmp_path: Path) -> None:
    server, ca = tmp_path / "server", tmp_path / "ca"
    certificates.new_ca(ca, SECRET)
    certificates.request(server, ["fed.example.org", "10.0.0.7"], "server secret")
    with pytest.raises(ValueError):
        certificates.sign(ca, server / "server.csr")
    out = certificates.sign(ca, server / "server.csr", SECRET)
    (server / "ca.crt").write_bytes((ca / "ca.crt").read_bytes())
    assert out == server / "server.crt"
    assert not (server / "ca.key").exists()
    assert certificates.hosts_of(out) == ["fed.example.org", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    certificate, key, authority = certificates.server_files(server)
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key, "server secret")  # they belong together
    with pytest.raises(ConfigError, match="If the CA is on another machine"):
        certificates.sign(server, server / "server.csr")
    (server / "server.csr").write_text("garbage")
    with pytest.raises(ConfigError, match="is not a request"):
        certificates.sign(ca, server / "server.csr", SECRET)


def test_certificates_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "SERVER_DAYS", 20)
    certificates.init(tmp_path, [])
    assert certificates.ending(tmp_path) == ["server.crt ends in 19 days; renew it with `fedmll keys init`"]
    certificates.server_files(tmp_path)
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    certificates.init(tmp_path, [])
    with pytest.raises(ConfigError, match=r"server.crt in .* is out of date"):
        certificates.server_files(tmp_path)
    (tmp_path / "server.crt").write_text("garbage")
    with pytest.raises(ConfigError, match="is not a certificate"):
        certificates.server_files(tmp_path)


def test_a_revoked_key_does_not_come_back_and_a_new_one_does(tmp_path: Path) -> None:
    at_server, at_site = tmp_path / "server", tmp_path / "site"
    _, public = keys.new_node(at_site, "site-a")
    at_server.mkdir()
    (at_server / "site-a.pub").write_bytes(public.read_bytes())
    before = keys.registered(at_server, ["site-a"])["site-a"]
    mark = keys.revoke(at_server, "site-a")
    assert keys.revoke(at_server, "site-a") == mark  # once is enough
    assert list(keys.revoked_in(at_server / keys.REVOKED)) == [mark]
    with pytest.raises(ConfigError, match=r"The key of site-a was revoked on 20.*keys rotate site-a"):
        keys.registered(at_server, ["site-a"])
    old = (at_site / "site-a.key").read_bytes()
    private_file, public = keys.rotate(at_site, "site-a")
    assert (at_site / "site-a.key.old").read_bytes() == old != private_file.read_bytes()
    assert (at_site / "site-a.key.old").stat().st_mode & 0o777 == 0o600
    (at_server / "site-a.pub").write_bytes(public.read_bytes())
    assert keys.registered(at_server, ["site-a"])["site-a"] != before
    with pytest.raises(ConfigError, match="nothing to replace"):
        keys.rotate(at_site, "site-b")


def test_the_commands_say_what_to_send_to_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str | Path) -> str:
        done = CliRunner().invoke(app, ["keys", *map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    monkeypatch.setenv(private.PASSPHRASE, SECRET)
    ca, server, site = tmp_path / "ca", tmp_path / "server", tmp_path / "site"
    assert "send to the server and every client" in call("ca", "--dir", ca, "--passphrase")
    assert "take to the CA" in call("request", "--dir", server, "--host", "fed.example.org")
    assert "holds for: fed.example.org, localhost" in call("sign", server / "server.csr", "--dir", ca)
    assert "send to the server's operator" in call("new", "site-a", "--dir", site, "--passphrase")
    assert b"ENCRYPTED" in (site / "site-a.key").read_bytes()
    assert "next start or resume" in call("rotate", "site-a", "--dir", site)
    assert b"ENCRYPTED" not in (site / "site-a.key").read_bytes()  # not asked for
    (server / "site-a.pub").write_bytes((site / "site-a.pub").read_bytes())
    assert "revoked: the key of site-a" in call("revoke", "site-a", "--dir", server)
    shown = call("list", "--dir", server)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    mark = keys.fingerprint(keys._public(server, ["site-a"])["site-a"].encode())
    assert f"site-a.pub │ {today} │ revoked {today} │ {mark}" in shown
    assert f"server.crt │ {today}" in shown or "server.crt" in shown
    both = call("init", "--dir", tmp_path / "both", "--host", "fed.example.org", "--passphrase")
    assert "holds for: fed.example.org" in both
    assert b"ENCRYPTED" in (tmp_path / "both" / "ca.key").read_bytes()
    call("init", "--dir", tmp_path / "both")  # a new certificate by the same CA, whose passphrase is found
