"""What is refused before anything is answered, and what every answer says to browsers."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tonnage.ui.guard import HEADERS, Guard, without_port
from tonnage.ui.settings import LOOPBACK

JSON = {"content-type": "application/json"}


@pytest.fixture
def client():
    return TestClient(Guard(PlainTextResponse("answered"), hosts=LOOPBACK), base_url="http://localhost:8765")


HOSTS = {
    "localhost": ("localhost:8765", 200),
    "a forwarded port": ("localhost:9000", 200),
    "no port": ("127.0.0.1", 200),
    "IPv6": ("[::1]:8765", 200),
    "in capitals": ("LOCALHOST:8765", 200),
    "a name made to lead here": ("evil.example:8765", 403),
    "a name that ends alike": ("evil-localhost", 403),
    "a name that begins alike": ("localhost.evil.example", 403),
    "with a user": ("localhost@evil.example", 403),
    "a port that is none": ("localhost:evil.example", 403),
    "an address of the net": ("192.168.0.7:8765", 403),
    "any address": ("0.0.0.0:8765", 403),
    "empty": ("", 403),
    "two": ("localhost, evil.example", 403),
}


@pytest.mark.parametrize(("host", "status"), HOSTS.values(), ids=HOSTS)
def test_only_this_server_is_answered_for(client, host, status):
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["problems"][0]["where"] == "Host"


def test_a_request_with_two_hosts_is_refused(client):
    assert client.get("/", headers=[("host", "localhost"), ("host", "localhost")]).status_code == 403


POSTS = {
    "a program": ({}, 200),
    "the page itself": ({"origin": "http://localhost:8765", "sec-fetch-site": "same-origin"}, 200),
    "behind a proxy": ({"origin": "https://localhost:8765"}, 200),
    "utf-8 said": ({"content-type": "application/json; charset=UTF-8"}, 200),
    "another site": ({"origin": "https://evil.example"}, 403),
    "another port": ({"origin": "http://localhost:3000"}, 403),
    "another name of this machine": ({"origin": "http://127.0.0.1:8765"}, 403),
    "a file": ({"origin": "null"}, 403),
    "said by the browser": ({"sec-fetch-site": "cross-site"}, 403),
    "a neighbour, by the browser": ({"sec-fetch-site": "same-site"}, 403),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "a form with a file": ({"content-type": "multipart/form-data; boundary=x"}, 415),
    "text": ({"content-type": "text/plain"}, 415),
    "almost JSON": ({"content-type": "application/jsonp"}, 415),
    "no type": ({"content-type": ""}, 415),
    "another charset": ({"content-type": "application/json; charset=utf-7"}, 415),
    "compressed": ({"content-encoding": "gzip"}, 415),
}


@pytest.mark.parametrize(("headers", "status"), POSTS.values(), ids=POSTS)
def test_what_another_site_could_post_is_refused(client, headers, status):
    assert client.post("/", content=b"{}", headers={**JSON, **headers}).status_code == status


def test_a_link_from_another_site_may_be_followed_but_not_read_by_its_scripts(client):
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert client.get("/", headers={"origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_can_only_lead_here(client, site):
    for mode, status in (("navigate", 200), ("no-cors", 403), ("cors", 403), ("websocket", 403)):
        asked = {"sec-fetch-site": site, "sec-fetch-mode": mode}
        assert client.get("/?checkpoint=models/large", headers=asked).status_code == status
    assert client.get("/", headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}).status_code == 200
    navigated = {**JSON, "sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    assert client.post("/", content=b"{}", headers=navigated).status_code == 403


def test_every_answer_has_the_headers(client):
    for answer in (client.get("/"), client.get("/", headers={"host": "evil.example"}), client.get("/api/gpus")):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert client.get("/").headers["cache-control"] == "no-cache"
    assert client.get("/api/gpus").headers["cache-control"] == "no-store"


def test_a_policy_allows_no_script_of_the_page_itself_and_no_frame():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_a_web_socket_is_refused(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass


def test_ports_are_digits():
    assert [without_port(host) for host in ("a:80", "a:", "a:b", "[::1]", "[::1]:1", "a:\u0661")] == [
        "a", "a:", "a:b", "[::1]", "[::1]", "a:\u0661",
    ]  # fmt: skip
