"""``sebulba board``: a real server on loopback, asked by a real client, whoever made the runs."""

from __future__ import annotations

import base64
import fcntl
import html
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from sebulba_board import run_index, server
from sebulba_board.run_details import films_of

from sebulba.commands import cli
from sebulba.runs.folder import RunFolder
from sebulba.runs.summary import RunSummary
from tests.support.browser import shown_in_a_browser
from tests.support.hostile_runs import SECRET, SPOILED, check_harmless, make_hostile_folder
from tests.tools.test_comparison import CONFIG, make_run, make_self_play


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class Served:
    """A board in a thread, as a context."""

    def __init__(self, root: Path) -> None:
        self.socket = server.listen(0)
        self.port = self.socket.getsockname()[1]
        self._server = server.server(root)
        self._thread = threading.Thread(target=self._server.run, args=([self.socket],))

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join(300)
        self.socket.close()
        assert not self._thread.is_alive()

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    folder.mkdir()
    make_hostile_folder(folder)
    with Served(folder) as served:
        yield served


@pytest.fixture
def board(tmp_path):
    make_run(tmp_path / "runs/one")
    make_run(tmp_path / "runs/two", agent={"learning_rate": 0.5}, returns=(1, 2, 3, 7.25))
    with Served(tmp_path / "runs") as served:
        yield served


def words_of(page: str) -> str:
    body = page.partition("<body>")[2]
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


def test_a_run_of_self_play_has_the_return_of_each_seat(board, tmp_path):
    make_self_play(tmp_path / "runs/three")
    assert "player/0 -0.25 player/1 0.25" in words_of(board.get("/").text)
    page = words_of(board.get("/run/three").text)
    assert "player/0 -0.25 player/1 0.25 return player/0 -0.5 player/1 0.5 last eval" in page


def test_the_table_has_a_line_for_each_run(board):
    answer = board.get("/")
    text = words_of(answer.text)
    assert answer.status == 200 and "2 runs" in text
    assert re.search(r"two Impala, CartPole-v1, seed 0 \S+ 400 100% 0:40 7.25 - done", text)
    assert '<a href="/run/one">one</a>' in answer.text


def test_a_run_has_the_page_of_its_report(board):
    answer = board.get("/run/two")
    assert answer.status == 200 and "two done Impala" in words_of(answer.text)
    report = board.get("/run/two/report.html")
    assert report.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert "<script" not in report.text and "agent.learning_rate 0.005 0.5" in words_of(report.text)


def test_films_are_played(tmp_path, board):
    run = tmp_path / "runs/one"
    assert "<video" not in board.get("/run/one").text
    (run / "videos").mkdir()
    for i in range(10):
        (run / f"videos/{i:012}.mp4").write_text(f"film {i}")
    (run / "video.mp4").write_text("the film of the end")
    page = board.get("/run/one").text
    found = re.findall(r'<video src="([^"]*)" controls preload="metadata" loop>', page)
    assert len(found) == 9 and found[0].startswith("/run/one/film/video.mp4?")
    assert found[1].startswith("/run/one/film/000000000009.mp4?")  # the newest first
    answer = board.get(found[1], Range="bytes=5-")
    assert answer.status == 206 and answer.text == "9"
    assert answer.headers["content-type"] == "video/mp4"
    assert "media-src 'self'" in board.get("/run/one").headers["content-security-policy"]
    report = board.get("/run/one/report.html").text
    (within,) = re.findall(r'<video src="data:video/mp4;base64,([^"]*)"', report)
    assert base64.b64decode(within) == b"the film of the end"


def test_only_films_of_a_run_are_sent(hostile):
    for path in (
        *("/run/good/film/config.json", "/run/good/film/video.mp4", "/run/none/film/video.mp4"),
        *("/run/good/film/..%2fconfig.json", "/run/film-leads-out/film/video.mp4"),
        *("/run/film-is-a-pipe/film/video.mp4", "/run/films-lead-out/film/000000031415.mp4"),
        *("/run/films-are-odd/film/a.html", "/run/link-out/film/video.mp4"),
    ):
        answer = hostile.get(path)
        assert answer.status == 404 and SECRET not in answer.text, path
    answer = hostile.get("/run/films-are-no-films/film/000000000010.mp4")
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_other_files_beside_films_do_not_hide_them(tmp_path, board):
    videos = tmp_path / "runs/one/videos"
    videos.mkdir()
    for i in range(250):
        (videos / f"{i}.txt").touch()
    (videos / "000000000007.mp4").write_text("a film")
    assert "/run/one/film/000000000007.mp4?" in board.get("/run/one").text


def test_a_link_that_takes_the_name_of_a_film_after_the_check_is_not_sent(
    tmp_path, board, monkeypatch
):
    film, secret = tmp_path / "runs/one/video.mp4", tmp_path / "secret"
    film.write_text("a film")
    secret.write_text(SECRET)

    def swapped(folder):
        films = films_of(folder)
        film.unlink()
        film.symlink_to(secret)
        return films

    monkeypatch.setattr("sebulba_board.server.films_of", swapped)
    answer = board.get("/run/one/film/video.mp4")
    assert answer.status == 404 and SECRET not in answer.text


def test_a_run_that_vanishes_or_cannot_be_read_is_left_out_of_the_table(board, monkeypatch):
    record = RunFolder.record

    def of_others(run):
        if run.path.name == "one":
            raise PermissionError(13, "Permission denied")
        return record(run)

    monkeypatch.setattr(RunFolder, "record", of_others)
    table = board.get("/")
    assert table.status == 200 and "Permission denied" in table.text and "two" in table.text
    assert board.get("/run/one").status == 409 and board.get("/run/two").status == 200


def test_two_runs_are_compared_as_by_sebulba_diff(board):
    answer = board.get("/diff?run=one&run=two")
    text = words_of(answer.text)
    assert answer.status == 200
    assert "agent.learning_rate 0.001 0.5" in text and "versions the same" in text
    assert "return of the last training episodes 4 7.25" in text
    for path in ("/diff", "/diff?run=one", "/diff?run=one&run=one&run=two"):
        assert board.get(path).status == 400
    assert board.get("/diff?run=one&run=three").status == 404


def test_a_page_changes_with_its_run_and_is_not_sent_again_before(tmp_path, board):
    one = tmp_path / "runs/one"
    for path, value in (("/", 123.5), ("/run/one", 678.5)):
        first = board.get(path)
        tag = first.headers["etag"]
        assert board.get(path, If_None_Match=tag).status == 304
        with open(one / "metrics.jsonl", "a") as file:
            file.write(f'{{"env_steps": 500, "seconds": 50, "episode_return_mean": {value}}}\n')
        second = board.get(path, If_None_Match=tag)
        assert second.status == 200 and second.headers["etag"] != tag
        assert str(value) in second.text


def test_a_run_that_ends_without_a_word_is_seen_to(tmp_path, board):
    run = make_run(tmp_path / "runs/three", ended="")
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "three running" in words_of(board.get("/run/three").text)
        assert board.get("/").text.count("badge running") == 1
    assert "three killed" in words_of(board.get("/run/three").text)
    assert "badge running" not in board.get("/").text
    (run / "config.json").unlink()
    assert board.get("/run/three").status == 404 and "three" not in board.get("/").text


def test_other_names_for_this_machine_are_refused(board):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0"):
        for path in ("/", "/run/one", "/board.js", "/nothing"):
            assert board.get(path, Host=host).status == 400
    for host in ("localhost", f"localhost:{board.port}", f"127.0.0.1:{board.port}"):
        assert board.get("/", Host=host).status == 200


def test_it_listens_on_loopback_and_only_answers(board):
    assert board.socket.getsockname()[0] == "127.0.0.1"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert board.get("/run/one", method).status == 405
    for path in ("/", "/run/one", "/diff?run=one&run=two", "/nothing", "/board.js"):
        headers = board.get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


PATHS = (
    *("/run/..", "/run/../..", "/run/..%2f..%2fetc%2fpasswd", "/run/%2e%2e", "/../etc/passwd"),
    *("/run//etc/passwd", "/run/%2fetc%2fpasswd", "/run/one%00", "/run/.", "/run/", "/run/one/.."),
    *("/run/link-out", "/run/link-to-itself", "/run/good/../link-out", "/run/%ff%fe", "//run/good"),
    *("/run/good/config.json", "/run/good/metrics.jsonl", "/static/x", "/run/" + "a" * 5000),
    *("/diff?run=good&run=..%2fgood", "/diff?run=/etc&run=good", "/run/good/report.html/.."),
)


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out(hostile, path):
    answer = hostile.get(path)
    assert answer.status in (400, 404, 409), answer
    check_harmless(answer.text) if answer.text.startswith("<!doctype") else None


def test_a_hostile_folder_is_a_table_and_does_nothing(hostile):
    page = hostile.get("/").text
    check_harmless(page)
    text = words_of(page)
    assert "good Impala, CartPole-v1" in text and "link that leads out of" in text
    for what in ("metrics-lead-out", "end-leads-out", "half-a-configuration", "metrics-are-a-pipe"):
        assert what in text.partition("Not shown")[2], what
    assert len(SPOILED) >= 20


def test_no_page_of_a_hostile_run_does_anything(hostile):
    words = re.findall(r'href="/run/([^"/]*)"', hostile.get("/").text)
    assert len(words) > 25
    for word in set(words) - {"large-metrics"}:  # takes seconds, and is reported elsewhere
        answer = hostile.get(f"/run/{quote(word)}")
        assert answer.status in (200, 409), (word, answer.status)
        check_harmless(answer.text)
    for word in words[:3]:
        check_harmless(hostile.get(f"/diff?run={quote(word)}&run=script-in-values").text)


@pytest.mark.slow
def test_a_browser_runs_nothing_of_theirs(hostile, tmp_path):
    for path in ("/", "/run/script-in-values", "/diff?run=script-in-values&run=good"):
        page = shown_in_a_browser(f"127.0.0.1:{hostile.port}{path}", tmp_path)
        check_harmless(page)
        assert "<title>owned" not in page and "does not answer" not in page


def test_an_open_page_shows_what_its_run_writes_next(tmp_path, board, monkeypatch):
    asked = []
    answer = server._answer

    def answer_and_train(request, page, status=200):
        asked.append(page)
        if len(asked) == 2:  # the first that the script of the page asks for
            with open(tmp_path / "runs/one/metrics.jsonl", "a") as file:
                file.write('{"env_steps": 500, "seconds": 50, "episode_return_mean": 678.5}\n')
        return answer(request, page, status)

    monkeypatch.setattr(server, "_answer", answer_and_train)
    shown = shown_in_a_browser(f"127.0.0.1:{board.port}/run/one", tmp_path / "profile")
    assert "678.5" not in asked[0] and "678.5" in words_of(shown)
    before, after = (re.findall(r"data:image/svg[^\"]*", page) for page in (asked[0], shown))
    assert before and before != after  # the curve


def test_runs_are_read_again_only_when_they_change(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        run_index, "read_run", lambda folder, how: read.append(folder.name) or _read(folder, how)
    )
    for name in ("a", "b"):
        make_run(tmp_path / name)
    kept = run_index.Shelf(tmp_path)
    for _ in range(3):
        assert all(isinstance(run, RunSummary) for run in kept.table().values())
    assert read == ["a", "b"]
    (tmp_path / "b/config.json").write_text(json.dumps(CONFIG | {"seed": 123}))
    assert kept.table()["b"].config["seed"] == 123
    assert read == ["a", "b", "b"]


_read = run_index.read_run


def test_of_a_run_that_goes_on_only_the_newest_row_is_kept(tmp_path):
    run = make_run(tmp_path / "alpha")
    kept = run_index.Shelf(tmp_path)
    for _ in range(3):
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"env_steps": 1}\n')
        (row,) = kept.table().values()
        assert [*kept._rows.values()] == [row]


def test_a_port_in_use_is_a_sentence(tmp_path, capsys):
    with server.listen(0) as bound:
        port = bound.getsockname()[1]
        assert cli.main(["board", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port} is in use; choose another" in capsys.readouterr().err
    for words in ([str(tmp_path / "none")], [str(tmp_path), "--port", "70000"]):
        assert cli.main(["board", *words]) == 2
    said = capsys.readouterr().err
    assert "is not a folder" in said and "from 0 to 65535" in said


def test_ctrl_c_ends_it_quietly(tmp_path):
    words = [sys.executable, "-m", "sebulba", "board", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first = process.stdout.readline()
        port = int(re.search(r"http://127.0.0.1:(\d+)/", first)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", "/")
        assert b"There is none yet" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)  # with a connection that is kept alive
        rest, errors = process.communicate(timeout=300)
        connection.close()
    assert (process.returncode, rest, errors) == (0, "", "")
