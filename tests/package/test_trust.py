"""What a key signs and what it does not; where the key is; what a configuration file may name."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys

import pytest

from sebulba.errors import UsageError
from sebulba.runs.read_config import read_config
from sebulba.support import trust
from sebulba.support.trust import Trust, signed, trust_of, was_changed

RECORD = {"run_id": "7", "env": {"id": "CartPole-v1", "options": {}}, "sizes": (1, 2)}


@pytest.fixture
def key(tmp_path, monkeypatch):
    file = tmp_path / "keys" / "of-me"
    monkeypatch.setenv(trust.KEY_VARIABLE, str(file))
    return file


def read_back(record: dict) -> dict:
    return json.loads(json.dumps(record))


def test_what_was_signed_is_trusted_after_a_trip_through_json(key):
    record = read_back(signed("run", RECORD))
    assert trust_of("run", record) == Trust(None) and not was_changed(record)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_key_is_made_once_even_by_processes_that_begin_together(key):
    program = (
        "from sebulba.support.trust import signed; print(signed('run', {})['signature']['key'])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    names = {process.communicate(timeout=300)[0] for process in started}
    assert len(names) == 1 and names != {""}
    assert [file.name for file in key.parent.iterdir()] == [key.name]


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (lambda r: r.update(run_id="8"), "was changed"),
        (lambda r: r["env"]["options"].update(x=1), "was changed"),
        (lambda r: r.pop("signature"), "is not signed"),
        (lambda r: r.update(signature=None), "is not signed"),
        (lambda r: r.update(signature="x" * 64), "is not signed"),
        (lambda r: r.update(signature={"key": 1, "hmac": 2}), "is not signed"),
        (lambda r: r["signature"].update(hmac="é" * 64), "was changed"),
        (lambda r: r["signature"].update(key="0" * 8), "another key signed it"),
    ],
)
def test_what_was_changed_is_not_trusted(key, change, doubt):
    record = read_back(signed("run", RECORD))
    change(record)
    found = trust_of("run", record)
    assert doubt in found.doubt and not found.is_trusted
    with pytest.raises(UsageError, match=f"x names os:system, and .*{doubt}.*--trust"):
        found.check("x names os:system")


def test_a_signature_is_of_one_kind(key):
    assert "was changed" in trust_of("policy", read_back(signed("run", RECORD))).doubt


def test_another_key_is_a_doubt_and_the_same_key_elsewhere_is_none(key, tmp_path, monkeypatch):
    record = read_back(signed("run", RECORD))
    copy = tmp_path / "on-another-machine"
    copy.write_bytes(key.read_bytes())
    monkeypatch.setenv(trust.KEY_VARIABLE, str(copy))
    monkeypatch.setenv("HOME", str(tmp_path / "another-home"))
    assert trust_of("run", record).is_trusted
    monkeypatch.setenv(trust.KEY_VARIABLE, str(tmp_path / "none"))
    assert "there is no key in" in trust_of("run", record).doubt
    assert not (tmp_path / "none").exists(), "reading makes no key"
    signed("run", {})
    assert "another key signed it" in trust_of("run", record).doubt


def test_a_key_that_cannot_be_made_is_said_and_leaves_records_unsigned(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trust.KEY_VARIABLE, str(tmp_path / "file" / "key"))
    assert signed("run", RECORD)["signature"] is None
    assert "cannot be read or made" in trust.key_problem()
    (tmp_path / "short").write_text("abc\n")
    monkeypatch.setenv(trust.KEY_VARIABLE, str(tmp_path / "short"))
    assert "has 3 bytes" in trust.key_problem()


def test_a_key_is_made_on_a_file_system_without_hard_links(key, monkeypatch):
    def link(*args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    record = read_back(signed("run", RECORD))
    assert trust_of("run", record).is_trusted
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_place_of_the_key_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(trust.KEY_VARIABLE, "~/secrets/key")
    assert trust.key_file() == tmp_path / "secrets" / "key"
    assert trust.key_problem() is None


def test_the_key_lies_beside_the_configuration_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv(trust.KEY_VARIABLE)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.key_file() == tmp_path / ".config" / "sebulba" / "key"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert trust.key_file() == tmp_path / "xdg" / "sebulba" / "key"


def test_trust_that_was_given_says_first_what_it_is_for(capsys):
    Trust("it is not signed", is_given=True).check("x names os:system")
    assert "trusted, as you say: x names os:system" in capsys.readouterr().err


# Configuration files.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"env.id": "os:system"}, "the environment os:system"),
        ({"env.id": "planted:CartPole-v1"}, "the environment planted:CartPole-v1"),
        ({"compile-cache": "/tmp/programs"}, "the compiled programs in /tmp/programs"),
        ({"run-dir": "../elsewhere"}, "the folder ../elsewhere"),
        ({"env.options": {"xml_file": "/etc/passwd"}}, "the option xml_file '/etc/passwd'"),
    ],
)
def test_what_a_configuration_file_names_needs_a_word(tmp_path, monkeypatch, options, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.json").write_text(json.dumps({"config": "cartpole", "options": options}))
    with pytest.raises(UsageError, match=r"names .*nothing says who wrote the file"):
        read_config(["theirs.json"], "sebulba train")
    _, config = read_config(["theirs.json", "--trust"], "sebulba train")
    assert named in config.named_code()
    assert os.listdir(tmp_path) == ["theirs.json"]


def test_an_option_that_is_a_folder_here_needs_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"env.options": {"base_path": "evil"}}
    (tmp_path / "theirs.json").write_text(json.dumps({"config": "cartpole", "options": options}))
    read_config(["theirs.json"], "sebulba train")
    (tmp_path / "evil").mkdir()
    with pytest.raises(UsageError, match="the option base_path 'evil', and nothing says who"):
        read_config(["theirs.json"], "sebulba train")


def test_what_is_named_cannot_write_on_the_terminal(tmp_path):
    env_id = "a:b\x1b[2K\nsebulba: it was signed by you"
    (tmp_path / "theirs.json").write_text(
        json.dumps({"config": "cartpole", "options": {"env.id": env_id}})
    )
    with pytest.raises(UsageError) as caught:
        read_config([str(tmp_path / "theirs.json")], "sebulba train")
    assert str(caught.value).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"trust": True, "env.id": "os:system"},
        {"env.id": ["os:system", "--trust"]},
    ],
)
def test_no_configuration_file_trusts_itself(tmp_path, options):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"config": "cartpole", "options": options}))
    with pytest.raises(UsageError, match="nothing says who wrote the file"):
        read_config([str(file)], "sebulba train")
    file.write_text('{"config": "cartpole", "options": {"trust": true}}')
    assert not read_config([str(file)], "sebulba train")[1].trust


def test_what_is_typed_needs_no_word(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"config": "cartpole", "options": {"env.id": "a.b:C"}}))
    _, config = read_config([str(file), "--env.id", "a.b:C"], "sebulba train")
    assert config.env.id == "a.b:C"
