"""The in-process broker answers like a server: the same commands to both, the replies compared."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Callable, Iterator
from typing import TypeAlias

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_core.bus.memory.server import MemoryServer
from runtime_core.errors import ServerError
from tests.conftest import OwnServer

Shown: TypeAlias = "bytes | int | str | list[Shown] | None"
Words: TypeAlias = tuple[str | bytes, ...]
Ask: TypeAlias = Callable[..., object]

KINDS = ("redis-7.0", "valkey-9")


class Wire:
    """A plain socket to a server: what comes back is the raw shape of RESP2."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._reader = hiredis.Reader(replyError=ServerError)

    def __call__(self, *words: str | bytes) -> object:
        """One command and its reply; an error reply is returned, not raised."""
        command: tuple[str | int | float | bytes | memoryview, ...] = words
        self._socket.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub says tuple of one
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return reply

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, own_server: OwnServer) -> Iterator[Wire]:
    wire = Wire(own_server(request.param, append=None).port)
    yield wire
    wire.close()


def in_memory(memory: MemoryServer) -> Ask:
    def ask(*words: str | bytes) -> object:
        try:
            return memory.execute(*words)
        except ServerError as error:
            return error

    return ask


def shown(words: Words, reply: object) -> Shown:
    """A reply without what may differ: idle times, the order of sets, nodes, and the wording of errors."""
    if isinstance(reply, ServerError):
        return "error " + str(reply).split(" ", 1)[0]
    plain = _plain(reply)
    command = _text(words[0]).upper()
    if not isinstance(plain, list):
        return plain
    if command in ("SMEMBERS", "KEYS", "SPOP"):
        return sorted(plain, key=repr)
    if command == "XPENDING" and len(words) > 3:
        return [[*entry[:2], "idle", entry[3]] for entry in plain if isinstance(entry, list)]
    if command == "XINFO" and _text(words[1]).upper() == "CONSUMERS":
        # Newer servers add `inactive`.
        return [[*entry[:5], "idle"] for entry in plain if isinstance(entry, list)]
    if command == "XINFO" and _text(words[1]).upper() == "STREAM":
        return [*plain[:3], "nodes", plain[4], "nodes", *plain[6:]]
    return plain


def _plain(reply: object) -> Shown:
    if isinstance(reply, list):
        return [_plain(item) for item in reply]
    if isinstance(reply, ServerError):
        return str(reply).encode()
    if isinstance(reply, bytes):
        return bytes(reply)
    assert reply is None or isinstance(reply, int)
    return reply


def _text(word: str | bytes) -> str:
    return word if isinstance(word, str) else word.decode()


def compare(server: Ask, script: list[Words]) -> None:
    """Send a script of commands to both and compare reply by reply."""
    memory = in_memory(MemoryServer())
    server("FLUSHALL")
    for at, words in enumerate(script):
        real, ours = server(*words), memory(*words)
        if words[0] == "TTL" and isinstance(real, int) and isinstance(ours, int) and min(real, ours) > 0:
            assert abs(real - ours) <= 5  # the two were asked one after the other, on a machine that may be busy
            continue
        assert shown(words, ours) == shown(words, real), (
            f"{b' '.join(word if isinstance(word, bytes) else word.encode() for word in words)!r} "
            f"(command {at}): {ours!r} is not {real!r}"
        )


def lines(text: str) -> list[Words]:
    """A script with one command per line."""
    return [tuple(shlex.split(line)) for line in text.strip().splitlines() if line.strip()]


SCRIPTS = {
    "keys": """
        SET a 1
        SET b 2 EX 100
        TTL a
        TTL b
        PTTL missing
        EXPIRE a 100 NX
        EXPIRE a 50 NX
        EXPIRE a 50 GT
        EXPIRE a 50 LT
        EXPIRE a 70 XX
        EXPIRE a 60 GT XX
        EXPIRE a 80 GT XX
        EXPIRE a x
        TTL a
        PERSIST a
        PERSIST a
        PERSIST missing
        TTL a
        EXPIRE a -1
        EXISTS a b b
        PEXPIREAT b 1
        GET b
        SET c 3 PX 100000
        SET c 4 KEEPTTL
        TTL c
        SET c 5
        TTL c
        HSET h f v
        TYPE h
        TYPE missing
        RPUSH l x
        TYPE l
        SADD s x
        TYPE s
        ZADD z 1 x
        TYPE z
        XADD x 1-1 a b
        TYPE x
        TYPE c
        KEYS *
        KEYS [hl]
        KEYS [^hl]
        KEYS ?
        KEYS \\\\*
        SCAN 0 TYPE hash COUNT 1000
        SCAN 0 MATCH l* COUNT 1000
        SCAN x
        DBSIZE
        DEL h h missing
        UNLINK l
        EXISTS h
        FLUSHALL
        DBSIZE
        PING
        PING hello
        NOSUCH a
        GET
        GET a b
        INFO a b
        CONFIG GET maxmemory-policy
        CONFIG GET nothing
        DBSIZE x
    """,
    "strings": """
        SET a 1 NX
        SET a 2 NX
        SET a 2 XX
        SET b 2 XX
        SET a 3 GET
        SET n 3 GET
        SET n 3 NX GET
        SET a 3 EX 0
        SET a 3 EX x
        SET a 3 EX
        SET a 3 NX XX
        SET a 3 EX 10 KEEPTTL
        SET a 3 BAD
        SETNX a 1
        SETNX q 1
        INCR q
        INCRBY q 40
        INCRBY q -2
        INCRBY q x
        INCR t
        SET big 9223372036854775807
        INCR big
        SET s text
        INCR s
        SET s " 5"
        INCR s
        SET s 05
        INCR s
        STRLEN s
        STRLEN missing
        GETDEL s
        GETDEL s
        MGET q missing a
        HSET h f v
        GET h
        INCR h
        MGET h q
        SET h now-a-string
        SET h x GET
    """,
    "hashes": """
        HSET h a 1 b 2
        HSET h a 3 c 4
        HSET h a
        HSET h a 1 b
        HSETNX h a 9
        HSETNX h d 9
        HSETNX new d 9
        HGET h a
        HGET h x
        HGET missing x
        HMGET h a x b
        HMGET missing a b
        HGETALL h
        HGETALL missing
        HLEN h
        HKEYS h
        HVALS h
        HEXISTS h a
        HEXISTS h x
        HEXISTS missing x
        HINCRBY h n 5
        HINCRBY h n -7
        HINCRBY h n x
        HSET h t text
        HINCRBY h t 1
        HINCRBY h n 9223372036854775807
        HINCRBY h n 9223372036854775807
        HINCRBYFLOAT h f 10.5
        HINCRBYFLOAT h f 0.1
        HINCRBYFLOAT h f -5.6
        HINCRBYFLOAT h f 5e3
        HINCRBYFLOAT h t 1
        HINCRBYFLOAT h f x
        HINCRBYFLOAT h f inf
        HSCAN h 0 MATCH [ab] COUNT 100
        HSCAN h 0
        HSCAN missing 0
        HDEL h a x b
        HDEL missing a
        HDEL new d
        EXISTS new
        SET s 1
        HSET s a 1
        HGET s a
        HDEL s a
    """,
    "lists": """
        RPUSH l a b c
        LPUSH l z y
        LRANGE l 0 -1
        LRANGE l 1 2
        LRANGE l -2 -1
        LRANGE l 3 1
        LRANGE l 0 100
        LRANGE l -100 0
        LRANGE l 9 10
        LRANGE missing 0 -1
        LRANGE l x 1
        LLEN l
        LLEN missing
        LINDEX l 0
        LINDEX l -1
        LINDEX l 99
        LINDEX missing 0
        RPUSH l a a
        LREM l 1 a
        LRANGE l 0 -1
        LREM l -1 a
        LRANGE l 0 -1
        LREM l 0 nothing
        LREM missing 0 x
        LTRIM l 1 -2
        LRANGE l 0 -1
        LPOP l
        RPOP l
        LPOP l 0
        LPOP l 10
        LPOP l
        LPOP l 2
        EXISTS l
        LPOP l -1
        LPOP l x
        RPUSH l a b c
        RPOP l 2
        LTRIM l 5 9
        EXISTS l
        RPUSH l a
        LREM l 0 a
        EXISTS l
        SET s 1
        RPUSH s a
        LRANGE s 0 1
    """,
    "sets": """
        SADD s a b c a
        SADD s c d
        SMEMBERS s
        SMEMBERS missing
        SCARD s
        SCARD missing
        SISMEMBER s a
        SISMEMBER s x
        SISMEMBER missing x
        SREM s a x
        SREM missing x
        SPOP missing
        SPOP missing 2
        SPOP s 100
        EXISTS s
        SADD s only
        SPOP s
        SPOP s 1
        SADD s only
        SPOP s 0
        SPOP s -1
        SREM s only
        EXISTS s
        SET t 1
        SADD t a
    """,
    "sorted sets": """
        ZADD z 1 a 2 b 3 c
        ZADD z 2 a
        ZADD z CH 2 a 5 b 9 d
        ZADD z NX 7 a 7 e
        ZADD z XX 8 a 8 f
        ZADD z XX CH 1.5 a
        ZADD z GT CH 1 a
        ZADD z LT CH 1 a
        ZADD z GT CH 3 new
        ZADD z INCR 2.25 a
        ZADD z NX INCR 2 a
        ZADD z GT INCR -2 a
        ZADD missing XX 1 a
        ZADD missing XX INCR 1 a
        EXISTS missing
        ZADD z NX XX 1 a
        ZADD z GT LT 1 a
        ZADD z NX GT 1 a
        ZADD z INCR 1 a 2 b
        ZADD z 1
        ZADD z 1 a 2
        ZADD z x a
        ZADD z nan a
        ZADD bad 1 a x b
        EXISTS bad
        ZADD z inf top -inf bottom
        ZSCORE z top
        ZSCORE z bottom
        ZSCORE z missing
        ZSCORE missing a
        ZMSCORE z a missing b
        ZMSCORE missing a b
        ZINCRBY z 1 a
        ZINCRBY z -0.5 fresh
        ZINCRBY z inf top
        ZINCRBY z -inf top
        ZCARD z
        ZCARD missing
        ZRANGE z 0 -1
        ZRANGE z 0 -1 WITHSCORES
        ZRANGE z 1 2
        ZRANGE z -3 -2
        ZRANGE z 5 2
        ZRANGE z 0 -1 REV
        ZRANGE z 1 2 REV WITHSCORES
        ZRANGE z 0 100 REV
        ZRANGE missing 0 -1
        ZRANGE z 1 5 BYSCORE
        ZRANGE z (1 5 BYSCORE WITHSCORES
        ZRANGE z 5 1 BYSCORE REV
        ZRANGE z 1 5 BYSCORE REV
        ZRANGE z -inf +inf BYSCORE LIMIT 1 2
        ZRANGE z +inf -inf BYSCORE REV LIMIT 1 2
        ZRANGE z -inf +inf BYSCORE LIMIT 1 -1
        ZRANGE z -inf +inf BYSCORE LIMIT -1 2
        ZRANGE z 0 -1 LIMIT 0 1
        ZRANGE z x 1
        ZRANGE z x 1 BYSCORE
        ZRANGEBYSCORE z -inf 3
        ZRANGEBYSCORE z -inf (3 WITHSCORES LIMIT 0 2
        ZRANGEBYSCORE z -inf inf LIMIT 100 2
        ZRANGEBYSCORE z 5 1
        ZRANGEBYSCORE z x 1
        ZCOUNT z 1 3
        ZCOUNT z (1 (3
        ZCOUNT missing 1 3
        ZRANK z a
        ZRANK z missing
        ZRANK missing a
        ZREM z e missing
        ZREMRANGEBYSCORE z 1 2
        ZREMRANGEBYSCORE z (9 inf
        ZREMRANGEBYSCORE missing 1 2
        ZREMRANGEBYRANK z 0 0
        ZREMRANGEBYRANK z -1 -1
        ZREMRANGEBYRANK z 5 9
        ZRANGE z 0 -1 WITHSCORES
        ZPOPMIN z
        ZPOPMIN z 0
        ZPOPMIN z 100
        ZPOPMIN z
        EXISTS z
        ZADD z 1 b 1 a 1 c
        ZRANGE z 0 -1
        ZADD z 1700000000123 t 0.5 half 1e20 huge 4503599627370497 exact
        ZRANGE z 0 -1 WITHSCORES
        ZREM z a b c t half huge exact
        EXISTS z
        SET s 1
        ZADD s 1 a
    """,
    "streams": """
        XADD s 0-0 a b
        XADD s 0 a b
        EXISTS s
        XADD s NOMKSTREAM 1-1 a b
        EXISTS s
        XADD s 1-1 a b
        XADD s 1-1 a b
        XADD s 0-5 a b
        XADD s 1-* a b
        XADD s 3-* a b
        XADD s 2-* a b
        XADD s 5 a b c d
        XADD s 6-0 a
        XADD s 6-0
        XADD s 6-x a b
        XADD s 1-2-3 a b
        XADD t 0-* a b
        XADD s NOMKSTREAM 7-0 a b
        XLEN s
        XLEN missing
        XRANGE s - +
        XRANGE s - + COUNT 2
        XRANGE s - + COUNT 0
        XRANGE s - + COUNT -1
        XRANGE s - + COUNT
        XRANGE s 1 1
        XRANGE s 1-2 3
        XRANGE s (1-1 (5
        XRANGE s (5-0 +
        XRANGE s 9 1
        XRANGE s x y
        XRANGE missing - +
        XREVRANGE s + - COUNT 2
        XREVRANGE s (5-0 -
        XREVRANGE s - +
        XDEL s 1-1 9-9
        XDEL s bad
        XDEL missing bad
        XADD s 1-1 a b
        XINFO STREAM s
        XDEL s 7-0
        XINFO STREAM s
        XADD s 7-0 a b
        XADD s 7-1 a b
        XTRIM s MAXLEN 3
        XRANGE s - +
        XTRIM s MAXLEN = 2
        XTRIM s MINID 7-1
        XTRIM s MAXLEN ~ 0
        XLEN s
        TYPE s
        XINFO STREAM s
        XADD s * a b x
        XADD s MAXLEN 2 8-1 a b
        XADD s MAXLEN 2 8-2 a b
        XADD s MAXLEN 2 8-3 a b
        XADD s MINID 8-3 9-1 a b
        XRANGE s - +
        XADD s MAXLEN ~ 1 9-2 a b
        XADD s MAXLEN ~ 1 LIMIT 0 9-3 a b
        XADD s MAXLEN 1 LIMIT 5 9-4 a b
        XADD s LIMIT 5 9-4 a b
        XADD s MAXLEN 1 MINID 5 9-4 a b
        XADD s MAXLEN -1 9-4 a b
        XADD s MAXLEN x 9-4 a b
        XLEN s
        XTRIM s MAXLEN 1 LIMIT 5
        XTRIM s MAXLEN ~ 1 LIMIT 5
        XTRIM s LIMIT 5
        XTRIM s BAD 5
        XTRIM missing MAXLEN 5
        XSETID s 8-0
        XSETID s 10-0
        XSETID missing 10-0
        XSETID s 11-0 ENTRIESADDED 1
        XSETID s 11-0 ENTRIESADDED 50 MAXDELETEDID 3-0
        XSETID s 11-0 ENTRIESADDED -1 MAXDELETEDID 3-0
        XSETID s 11-0 ENTRIESADDED 50 MAXDELETEDID 30-0
        XINFO STREAM s
        XADD s 10-5 a b
        XADD s 18446744073709551615-18446744073709551615 a b
        XADD s * a b
        XADD s 18446744073709551616-1 a b
        XINFO STREAM missing
        XINFO BAD s
        XINFO STREAM
        SET k 1
        XADD k 1-1 a b
        XLEN k
        XINFO STREAM k
    """,
    "reading": """
        XADD s 1-1 a b
        XADD s 2-1 c d
        XADD t 1-1 e f
        XREAD STREAMS s 0
        XREAD COUNT 1 STREAMS s t 0 0
        XREAD STREAMS s t 1-1 1-1
        XREAD STREAMS s 2-1
        XREAD STREAMS s $
        XREAD STREAMS missing $
        XREAD STREAMS missing 0
        XREAD COUNT 0 STREAMS s 0
        XREAD COUNT -5 STREAMS s 0
        XREAD STREAMS s >
        XREAD STREAMS s t 0
        XREAD GROUP g c STREAMS s 0
        XREAD NOACK STREAMS s 0
        XREAD COUNT x STREAMS s 0
        XREAD COUNT 1
        XREAD BLOCK -1 STREAMS s $
        XREAD BLOCK x STREAMS s $
        XREAD STREAMS s bad
        XREADGROUP GROUP g c STREAMS s >
        XREADGROUP GROUP g c STREAMS missing >
        XREADGROUP COUNT 1 COUNT 1 STREAMS s >
        XGROUP CREATE s g 0
        XREADGROUP GROUP g c STREAMS s $
        XREADGROUP GROUP g c STREAMS s bad
        XREADGROUP GROUP g c STREAMS s t >
        SET k 1
        XREAD STREAMS k 0
        XREADGROUP GROUP g c STREAMS k >
    """,
    "groups": """
        XGROUP CREATE s g $
        XGROUP CREATE s g $ MKSTREAM
        XGROUP CREATE s g $ MKSTREAM
        XGROUP CREATE s h 0
        XGROUP CREATE s bad x
        XGROUP CREATE s e 0 ENTRIESREAD 5
        XGROUP CREATE s e2 0 ENTRIESREAD -1
        XGROUP CREATE s e3 0 ENTRIESREAD -2
        XGROUP CREATE s e3 0 NONSENSE
        XGROUP CREATE s e3
        XGROUP NONSENSE s e3
        XINFO GROUPS s
        XADD s 1-1 a 1
        XADD s 2-1 a 2
        XADD s 3-1 a 3
        XADD s 4-1 a 4
        XREADGROUP GROUP g c1 COUNT 2 STREAMS s >
        XREADGROUP GROUP g c2 COUNT 1 STREAMS s >
        XINFO GROUPS s
        XPENDING s g
        XPENDING s g - + 10
        XPENDING s g - + 10 c1
        XPENDING s g - + 1
        XPENDING s g - + 0
        XPENDING s g - + -1
        XPENDING s g (1-1 + 10
        XPENDING s g 2-1 2-1 1 c1
        XPENDING s g 2-1 2-1 1 c2
        XPENDING s g - + 10 nobody
        XPENDING s g IDLE 0 - + 10
        XPENDING s g IDLE 100000 - + 10
        XPENDING s g IDLE 100000
        XPENDING s g - +
        XPENDING s g x + 10
        XPENDING s g - + x
        XPENDING s nogroup
        XPENDING missing g - + 10
        XREADGROUP GROUP g c1 STREAMS s 0
        XREADGROUP GROUP g c1 COUNT 1 STREAMS s 0
        XREADGROUP GROUP g c1 STREAMS s 1-1
        XREADGROUP GROUP g c3 STREAMS s 0
        XPENDING s g - + 10
        XDEL s 2-1
        XREADGROUP GROUP g c1 STREAMS s 0
        XPENDING s g - + 10
        XACK s g 1-1 9-9
        XACK s g 1-1
        XACK s nogroup 1-1
        XACK missing g 1-1
        XACK s g bad
        XREADGROUP GROUP g c1 NOACK STREAMS s >
        XREADGROUP GROUP g c1 STREAMS s >
        XPENDING s g
        XINFO CONSUMERS s g
        XINFO CONSUMERS s nogroup
        XINFO CONSUMERS missing g
        XINFO CONSUMERS s
        XGROUP SETID s g 0
        XREADGROUP GROUP g c9 STREAMS s >
        XPENDING s g - + 10
        XPENDING s g
        XINFO GROUPS s
        XGROUP SETID s g $
        XGROUP SETID s nogroup $
        XGROUP SETID missing g $
        XGROUP CREATECONSUMER s g fresh
        XGROUP CREATECONSUMER s g fresh
        XGROUP CREATECONSUMER s nogroup fresh
        XGROUP DELCONSUMER s g c9
        XGROUP DELCONSUMER s g nobody
        XGROUP DELCONSUMER missing g c9
        XPENDING s g
        XINFO CONSUMERS s g
        XGROUP DESTROY s g
        XGROUP DESTROY s g
        XGROUP DESTROY missing g
        XREADGROUP GROUP g c1 STREAMS s >
        DEL s
        XGROUP CREATE s g 0
        SET k 1
        XGROUP CREATE k g 0 MKSTREAM
        XACK k g 1-1
        XPENDING k g
    """,
    "claims": """
        XGROUP CREATE s g 0 MKSTREAM
        XADD s 1-1 a 1
        XADD s 2-1 a 2
        XADD s 3-1 a 3
        XADD s 4-1 a 4
        XREADGROUP GROUP g c1 COUNT 3 STREAMS s >
        XCLAIM s g c2 0 1-1
        XPENDING s g - + 10
        XCLAIM s g c2 0 1-1 2-1 9-9 JUSTID
        XPENDING s g - + 10
        XCLAIM s g c2 1000000 3-1
        XCLAIM s g c2 0 4-1
        XCLAIM s g c2 0 4-1 FORCE
        XPENDING s g - + 10
        XCLAIM s g c3 0 1-1 RETRYCOUNT 7
        XCLAIM s g c3 0 1-1 RETRYCOUNT 0 JUSTID
        XPENDING s g - + 10
        XCLAIM s g c3 0 1-1 IDLE 5000 JUSTID
        XPENDING s g IDLE 4000 - + 10
        XCLAIM s g c3 0 1-1 TIME 1 JUSTID
        XCLAIM s g c1 4000 1-1 2-1 JUSTID
        XCLAIM s g c1 0 1-1 LASTID 50-0 JUSTID
        XINFO GROUPS s
        XCLAIM s g c1 0 1-1 NONSENSE
        XCLAIM s g c1 x 1-1
        XCLAIM s g c1 -5 1-1 JUSTID
        XCLAIM s g c1 0 1-1 IDLE x
        XCLAIM s g c1 0 1-1 RETRYCOUNT -1 JUSTID
        XCLAIM s nogroup c1 0 1-1
        XCLAIM missing g c1 0 1-1
        XDEL s 2-1
        XPENDING s g - + 10
        XCLAIM s g c5 0 2-1
        XPENDING s g - + 10
        XCLAIM s g c5 0 2-1 FORCE
        XPENDING s g
        XADD s 5-1 a 5
        XGROUP SETID s g 4-1
        XREADGROUP GROUP g c1 STREAMS s >
        XDEL s 3-1
        XAUTOCLAIM s g c6 0 0 COUNT 1
        XAUTOCLAIM s g c6 0 1-2 COUNT 1
        XAUTOCLAIM s g c6 0 - JUSTID
        XPENDING s g - + 10
        XAUTOCLAIM s g c6 1000000 0
        XAUTOCLAIM s g c6 0 (1-1 COUNT 10
        XAUTOCLAIM s g c6 0 0 COUNT 0
        XAUTOCLAIM s g c6 0 0 COUNT x
        XAUTOCLAIM s g c6 0 0 NONSENSE
        XAUTOCLAIM s nogroup c6 0 0
        XAUTOCLAIM missing g c6 0 0
        XPENDING s g
        SET k 1
        XCLAIM k g c1 0 1-1
        XAUTOCLAIM k g c1 0 0
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_answer_as_a_server_does(server: Wire, name: str) -> None:
    compare(server, lines(SCRIPTS[name]))


def test_a_consumer_is_there_once_it_asked(own_server: OwnServer) -> None:
    wire = Wire(own_server("valkey-9", append=None).port)
    compare(
        wire,
        lines("""
            XGROUP CREATE s g 0 MKSTREAM
            XREADGROUP GROUP g reads STREAMS s >
            XREADGROUP GROUP g skips NOACK STREAMS s >
            XCLAIM s g claims 0 1-1
            XAUTOCLAIM s g sweeps 0 0
            XINFO CONSUMERS s g
        """),
    )
    wire.close()


def test_approximate_trimming_drops_whole_nodes(server: Wire) -> None:
    script: list[Words] = [("XADD", "s", f"{n}-1", "a", "b") for n in range(1, 251)]
    script += lines("""
        XTRIM s MAXLEN ~ 100 LIMIT 50
        XTRIM s MAXLEN ~ 100
        XLEN s
        XTRIM s MINID ~ 180-1
        XTRIM s MINID ~ 205-1
        XLEN s
        XTRIM s MAXLEN ~ 0
        XLEN s
    """)
    compare(server, script)


def test_the_lag_of_a_group_is_known_where_a_server_knows_it(server: Wire) -> None:
    script: list[Words] = [("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")]
    script += [("XADD", "s", f"{n}-1", "a", "b") for n in range(1, 7)]
    script += lines("""
        XINFO GROUPS s
        XREADGROUP GROUP g c COUNT 2 STREAMS s >
        XINFO GROUPS s
        XDEL s 1-1
        XINFO GROUPS s
        XTRIM s MAXLEN 4
        XINFO GROUPS s
        XREADGROUP GROUP g c COUNT 1 STREAMS s >
        XINFO GROUPS s
        XDEL s 5-1
        XINFO GROUPS s
        XREADGROUP GROUP g c COUNT 9 STREAMS s >
        XINFO GROUPS s
        XGROUP SETID s g 4-1
        XINFO GROUPS s
        XGROUP SETID s g 4-1 ENTRIESREAD 3
        XINFO GROUPS s
        XDEL s 2-1 3-1 4-1 6-1
        XINFO GROUPS s
    """)
    compare(server, script)


# Scripts that return something, with the keys and arguments `k1 k2 / a1 a2`.
LUA = [
    "return {KEYS[1], KEYS[2], ARGV[1], ARGV[2], #KEYS, #ARGV}",
    "return nil",
    "return false",
    "return true",
    "return 3.99",
    "return -3.99",
    "return '3.99'",
    "return {1, 2, nil, 4}",
    "return {1, {2, {3, {}}}, false, true, 'x', 1.9}",
    "return {ok='FINE'}",
    "return {err='MY error'}",
    "return redis.status_reply('FINE')",
    "return redis.error_reply('MY error')",
    "return redis.error_reply('-MY error')",
    "return {a = 1, b = 2}",
    "return function() end",
    "return redis.call('SET', KEYS[1], ARGV[1])",
    "return redis.call('SET', KEYS[1], ARGV[1]).ok",
    "return redis.call('TYPE', KEYS[1]).ok",
    "return type(redis.call('GET', 'missing'))",
    "return redis.call('GET', 'missing')",
    "return redis.call('set', KEYS[1], 5)",
    "redis.call('SET', KEYS[1], 12.5) return redis.call('GET', KEYS[1])",
    "redis.call('SET', KEYS[1], 1e15) return redis.call('GET', KEYS[1])",
    "redis.call('SET', KEYS[1], 10/2) return redis.call('GET', KEYS[1])",
    "redis.call('SET', KEYS[1], 2^53) return redis.call('GET', KEYS[1])",
    "redis.call('SET', KEYS[1], -7) return redis.call('GET', KEYS[1])",
    "return redis.call('INCRBY', KEYS[2], 41) + 1",
    "local v = redis.call('HMGET', 'missing', 'a', 'b') return {type(v[1]), #v}",
    "redis.call('XADD', 's', '1-1', 'a', 'b') return redis.call('XRANGE', 's', '-', '+')",
    "redis.call('XADD', 's', '1-1', 'a', 'b') return redis.call('XRANGE', 's', '-', '+')[1][2][1]",
    "redis.call('XGROUP', 'CREATE', 's', 'g', 0, 'MKSTREAM') return redis.call('XPENDING', 's', 'g')",
    "return redis.call('HGET', KEYS[1])",
    "return redis.call('NOSUCH')",
    "return redis.call()",
    "return redis.call('GET', {})",
    "return redis.call('GET', nil)",
    "return redis.call('GET', true)",
    "return redis.call('EVAL', 'return 1', 0)",
    "redis.call('SET', KEYS[1], 'x') local v = redis.call('HGET', KEYS[1], 'f') return v",
    "redis.call('SET', KEYS[1], 'x') return redis.pcall('HGET', KEYS[1], 'f')",
    "redis.call('SET', KEYS[1], 'x') return redis.pcall('HGET', KEYS[1], 'f').err",
    "redis.call('SET', KEYS[1], 'x') local ok, e = pcall(redis.call, 'HGET', KEYS[1], 'f') return {type(e), e.err}",
    "redis.call('SET', KEYS[1], 'x') local ok, e = pcall(function() error('mine') end) return e",
    "error('mine')",
    "error({err='MINE all mine'})",
    "local t = nil return t.x",
    "return undeclared",
    "undeclared = 1",
    "function undeclared() end",
    "string.sub = nil",
    "return type(string.format) .. type(table.concat) .. type(math.floor)",
    "return tostring(rawget(_G, 'require')) .. tostring(rawget(_G, 'io'))",
    "return {tostring(nil), tonumber('0x10'), select('#', 1, 2), unpack({7, 8})}",
    "return {string.match('12-3', '^(%d+)-(%d+)$')}",
    "local t = {} for i = 1, 9000 do t[i] = i end return t",
    "local t = {} for i = 1, 6000 do t[i] = 'missing' end return #redis.call('MGET', unpack(t))",
    "return redis.sha1hex('x')",
    "return redis.log(redis.LOG_DEBUG, 'x', 1)",
    "return redis.log('x')",
    "return redis.log(9, 'x')",
    "return redis.register_function",
    "this does not compile",
    "return cjson.encode({1, 2, 'x', true, false, cjson.null})",
    "return cjson.encode({a = {b = 'c'}})",
    "return cjson.encode({})",
    "return cjson.encode('quote \" slash / back \\\\ tab \\t new \\n bell \\7 del \\127 é')",
    "return cjson.encode(0.1) .. cjson.encode(1/3) .. cjson.encode(100) .. cjson.encode(-1.5e300)",
    "return cjson.encode(123456789012345678)",
    "return cjson.encode({[1] = 'a', [3] = 'c'})",
    "return cjson.encode({[1000] = 'a'})",
    "return cjson.encode({[1.5] = 'a'})",
    "return cjson.encode(1/0)",
    "return cjson.encode(function() end)",
    "return cjson.decode('[1, 2.5, -3e2, \"x\", true, null]')[3]",
    'return cjson.decode(\'{"a": {"b": [1, {"c": "\\\\u00e9\\\\ud83d\\\\ude00\\\\n"}]}}\').a.b[2].c',
    "return tostring(cjson.decode('[null]')[1] == cjson.null)",
    "return type(cjson.null)",
    "return #cjson.decode('[]')",
    "return cjson.decode(' \"x\" ')",
    "return cjson.decode('7')",
    "return cjson.decode('')",
    "return cjson.decode('{')",
    "return cjson.decode('[1,]')",
    "return cjson.decode('[1] x')",
    "return cjson.decode('{\"a\" 1}')",
    "return cjson.decode('\"unfinished')",
    "return cjson.decode('nope')",
    'return cjson.encode(cjson.decode(\'{"k":[1,{"z":"\\\\/"}]}\'))',
    "return cmsgpack.pack({1, -1, 127, 128, 255, 256, 65535, 65536, 4294967295, 4294967296, -32, -33, -128, -129})",
    "return cmsgpack.pack({-32768, -32769, -2147483648, -2147483649, -1e15, 1e15, 2^53})",
    "return cmsgpack.pack({1.5, 0.1, -2.25, 1e300})",
    "return cmsgpack.pack({'', 'x', string.rep('y', 31), string.rep('y', 32), string.rep('y', 256)})",
    "return cmsgpack.pack(string.rep('z', 70000))",
    "return cmsgpack.pack({a = true})",
    "return cmsgpack.pack({}, nil, false, {b = {1, 2}})",
    "local t = {} for i = 1, 20 do t[i] = i end return cmsgpack.pack(t)",
    "return {cmsgpack.unpack(cmsgpack.pack(1, 'x', {3, {4}}, -5, 70000, -70000))}",
    "return cmsgpack.unpack(cmsgpack.pack({k = {1, 2.5}})).k[2] * 2",
    "return tostring(cmsgpack.unpack(cmsgpack.pack(-1e15))) .. tostring(cmsgpack.unpack(cmsgpack.pack(0.1)))",
    "return cmsgpack.unpack('\\146\\1')",
    "return cmsgpack.unpack('\\193')",
    "return cmsgpack.pack()",
]


def test_scripts_convert_as_on_a_server(server: Wire) -> None:
    for code in LUA:
        compare(server, [("EVAL", code, "2", "k1", "k2", "a1", "a2")])


def test_what_a_script_wrote_before_an_error_stays(server: Wire) -> None:
    code = "redis.call('SET', KEYS[1], 'kept') redis.call('HSET', KEYS[1], 'f', 'v')"
    compare(server, [("EVAL", code, "1", "k"), ("GET", "k")])


LIBRARY = """#!lua name=mylib
local function store(keys, args)
  redis.call('HSET', keys[1], args[1], args[2])
  return redis.call('HGETALL', keys[1])
end
local function peek(keys, args) return redis.call('HGET', keys[1], args[1]) end
redis.register_function('mystore', store)
redis.register_function{function_name = 'mypeek', callback = peek, flags = {'no-writes'}, description = 'looks'}
redis.register_function{function_name = 'mysneak', callback = store, flags = {'no-writes'}}
"""


def test_function_libraries_behave_as_on_a_server(server: Wire) -> None:
    other = "#!lua name=other\nredis.register_function('mypeek', function() return 1 end)"
    script: list[Words] = [
        ("FCALL", "mystore", "1", "h", "f", "v"),
        ("FUNCTION", "LOAD", LIBRARY),
        ("FUNCTION", "LOAD", LIBRARY),
        ("FUNCTION", "LOAD", "REPLACE", LIBRARY),
        ("FUNCTION", "LOAD", other),
        ("FUNCTION", "LOAD", "REPLACE", other),
        ("FCALL", "mystore", "1", "h", "f", "v"),
        ("FCALL", "mypeek", "1", "h", "f"),
        ("FCALL_RO", "mypeek", "1", "h", "f"),
        ("FCALL_RO", "mystore", "1", "h", "f", "v"),
        ("FCALL_RO", "mysneak", "1", "h", "f", "v2"),
        ("FCALL", "mysneak", "1", "h", "f", "v2"),
        ("FCALL", "mypeek", "1", "h", "f"),
        ("FCALL", "mystore", "9", "h"),
        ("FCALL", "mystore", "-1", "h"),
        ("FCALL", "mystore", "x", "h"),
        ("FCALL", "mystore", "1"),
        ("FCALL", "nosuch", "0"),
        ("FUNCTION", "LIST", "LIBRARYNAME", "nosuch"),
        ("FUNCTION", "LIST", "NONSENSE"),
        ("FUNCTION", "DELETE", "nosuch"),
        ("FLUSHALL",),
        ("FCALL", "mystore", "1", "h", "f", "v"),
        ("FUNCTION", "DELETE", "mylib"),
        ("FCALL", "mystore", "1", "h", "f", "v"),
        ("FUNCTION", "LOAD", other),
        ("FUNCTION", "LIST"),
        ("FUNCTION", "LIST", "LIBRARYNAME", "oth*", "WITHCODE"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LIST"),
        ("FUNCTION", "NONSENSE"),
        ("FUNCTION", "LOAD", "no metadata"),
        ("FUNCTION", "LOAD", "#!lua\nreturn 1"),
        ("FUNCTION", "LOAD", "#!lua name=a-b\nreturn 1"),
        ("FUNCTION", "LOAD", "#!lua name=a name=b\nreturn 1"),
        ("FUNCTION", "LOAD", "#!lua name=a other=b\nreturn 1"),
        ("FUNCTION", "LOAD", "#!js name=a\nreturn 1"),
        ("FUNCTION", "LOAD", "#!lua name=a\nreturn 1"),
        ("FUNCTION", "LOAD", "#!lua name=a\nthis does not compile"),
        ("FUNCTION", "LOAD", "#!lua name=a\nredis.call('GET', 'k')"),
        ("FUNCTION", "LOAD", "#!lua name=a\nglobal = 1"),
        ("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function('bad-name', function() end)"),
        ("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function('f')"),
        ("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function('f', 1)"),
        ("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function{function_name='f', callback=1}"),
        (
            "FUNCTION",
            "LOAD",
            "#!lua name=a\nredis.register_function{function_name='f', callback=pcall, flags={'x'}}",
        ),
        (
            "FUNCTION",
            "LOAD",
            "#!lua name=a\nredis.register_function('f', pcall) redis.register_function('f', pcall)",
        ),
    ]
    server("FUNCTION", "FLUSH")
    compare(server, script)


def test_a_failing_function_says_where(server: Wire) -> None:
    code = (
        "#!lua name=lib\nlocal function f(keys)\n  local v = redis.call('HGET', keys[1], 'x')\n  return v\nend\n"
        "redis.register_function('f', f)"
    )
    memory = in_memory(MemoryServer())
    for ask in (server, memory):
        ask("FUNCTION", "LOAD", code)
        ask("SET", "k", "v")
        error = str(ask("FCALL", "f", "1", "k"))
        assert re.fullmatch(
            r"WRONGTYPE Operation against a key holding the wrong kind of value script: (f, )?on @user_function:3\.",
            error,
        )


# Random scripts over few keys, so that commands meet what others left behind.

KEYS = st.sampled_from(["k1", "k2"])
IDS = st.sampled_from(["1-1", "1-2", "2-1", "3-1", "3-7", "4-1", "5-5", "9-0"])
BOUNDS = st.sampled_from(["-", "+", "0", "2", "3-1", "(1-1", "(4-1", "9-9"])
NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "-2", "5", "100"])
SCORES = st.sampled_from(["0", "1", "2.5", "-3", "(1", "inf", "-inf"])
GROUPS = st.sampled_from(["g", "h"])


def one(*words: str | st.SearchStrategy[str]) -> st.SearchStrategy[Words]:
    """A command whose words are fixed or drawn."""
    return st.tuples(*[st.just(word) if isinstance(word, str) else word for word in words])


STREAM_COMMANDS = st.one_of(
    one("XADD", KEYS, IDS, "f", NAMES),
    one("XADD", KEYS, IDS, "f", NAMES),
    one("XADD", KEYS, "MAXLEN", NUMBERS, IDS, "f", NAMES),
    one("XADD", KEYS, "5-*", "f", NAMES),
    one("XDEL", KEYS, IDS, IDS),
    one("XLEN", KEYS),
    one("XRANGE", KEYS, BOUNDS, BOUNDS, "COUNT", NUMBERS),
    one("XREVRANGE", KEYS, BOUNDS, BOUNDS),
    one("XTRIM", KEYS, "MAXLEN", NUMBERS),
    one("XTRIM", KEYS, "MINID", IDS),
    one("XGROUP", "CREATE", KEYS, GROUPS, st.sampled_from(["0", "$", "2-1"]), "MKSTREAM"),
    one("XGROUP", "CREATE", KEYS, GROUPS, "0", "MKSTREAM"),
    one("XGROUP", "SETID", KEYS, GROUPS, st.sampled_from(["0", "$", "2-1"])),
    one("XGROUP", "DESTROY", KEYS, GROUPS),
    one("XGROUP", "DELCONSUMER", KEYS, GROUPS, NAMES),
    one("XGROUP", "CREATECONSUMER", KEYS, GROUPS, NAMES),
    one("XREADGROUP", "GROUP", GROUPS, NAMES, "COUNT", NUMBERS, "STREAMS", KEYS, ">"),
    one("XREADGROUP", "GROUP", GROUPS, NAMES, "COUNT", NUMBERS, "STREAMS", KEYS, ">"),
    one("XREADGROUP", "GROUP", GROUPS, NAMES, "NOACK", "STREAMS", KEYS, ">"),
    one("XREADGROUP", "GROUP", GROUPS, NAMES, "STREAMS", KEYS, st.sampled_from(["0", "2-1"])),
    one("XREADGROUP", "GROUP", GROUPS, NAMES, "STREAMS", "k1", "k2", ">", "0"),
    one("XREAD", "COUNT", NUMBERS, "STREAMS", "k1", "k2", IDS, st.sampled_from(["$", "0"])),
    one("XACK", KEYS, GROUPS, IDS, IDS),
    one("XCLAIM", KEYS, GROUPS, NAMES, st.sampled_from(["0", "1000000"]), IDS, IDS),
    one("XCLAIM", KEYS, GROUPS, NAMES, "0", IDS, "FORCE"),
    one("XCLAIM", KEYS, GROUPS, NAMES, "0", IDS, "JUSTID", "RETRYCOUNT", NUMBERS),
    one("XAUTOCLAIM", KEYS, GROUPS, NAMES, "0", BOUNDS, "COUNT", NUMBERS),
    one("XPENDING", KEYS, GROUPS),
    one("XPENDING", KEYS, GROUPS, BOUNDS, BOUNDS, NUMBERS),
    one("XPENDING", KEYS, GROUPS, "-", "+", "10", NAMES),
    one("XINFO", "STREAM", KEYS),
    one("XINFO", "CONSUMERS", KEYS, GROUPS),
    # Servers differ in how far an id may be set back, so it only goes forward here.
    one("XSETID", KEYS, "9-9"),
    one("DEL", KEYS),
)

VALUE_COMMANDS = st.one_of(
    one("HSET", KEYS, NAMES, NUMBERS, NAMES, NAMES),
    one("HDEL", KEYS, NAMES, NAMES),
    one("HINCRBY", KEYS, NAMES, NUMBERS),
    one("HGETALL", KEYS),
    one("HMGET", KEYS, NAMES, NAMES),
    one("HSETNX", KEYS, NAMES, NAMES),
    one("RPUSH", KEYS, NAMES, NAMES),
    one("LPUSH", KEYS, NAMES),
    one("LPOP", KEYS, NUMBERS),
    one("RPOP", KEYS),
    one("LREM", KEYS, NUMBERS, NAMES),
    one("LTRIM", KEYS, NUMBERS, NUMBERS),
    one("LRANGE", KEYS, NUMBERS, NUMBERS),
    one("LINDEX", KEYS, NUMBERS),
    one("SADD", KEYS, NAMES, NAMES),
    one("SREM", KEYS, NAMES),
    one("SMEMBERS", KEYS),
    one("ZADD", KEYS, SCORES, NAMES, SCORES, NAMES),
    one("ZADD", KEYS, st.sampled_from(["NX", "XX", "GT", "LT"]), "CH", SCORES, NAMES),
    one("ZADD", KEYS, st.sampled_from(["NX", "XX", "GT", "LT"]), "INCR", SCORES, NAMES),
    one("ZINCRBY", KEYS, SCORES, NAMES),
    one("ZREM", KEYS, NAMES),
    one("ZRANGE", KEYS, NUMBERS, NUMBERS, "WITHSCORES"),
    one("ZRANGE", KEYS, NUMBERS, NUMBERS, "REV"),
    one("ZRANGE", KEYS, SCORES, SCORES, "BYSCORE", "REV", "LIMIT", NUMBERS, NUMBERS),
    one("ZRANGEBYSCORE", KEYS, SCORES, SCORES, "LIMIT", NUMBERS, NUMBERS),
    one("ZREMRANGEBYSCORE", KEYS, SCORES, SCORES),
    one("ZREMRANGEBYRANK", KEYS, NUMBERS, NUMBERS),
    one("ZCOUNT", KEYS, SCORES, SCORES),
    one("ZRANK", KEYS, NAMES),
    one("ZPOPMIN", KEYS, NUMBERS),
    one("SET", KEYS, NUMBERS, st.sampled_from(["NX", "XX", "GET", "KEEPTTL"])),
    one("INCRBY", KEYS, NUMBERS),
    one("GETDEL", KEYS),
    one("EXPIRE", KEYS, st.sampled_from(["100", "200", "-1"]), st.sampled_from(["NX", "XX", "GT", "LT"])),
    one("TTL", KEYS),
    one("PERSIST", KEYS),
    one("TYPE", KEYS),
    one("EXISTS", "k1", "k2"),
    one("DEL", KEYS),
)


def with_consumers(script: list[Words]) -> list[Words]:
    """The script with consumers made before they read or claim.

    Redis 7.0 makes a consumer when it gets its first entry, later servers and this broker when it first asks.
    """
    made: list[Words] = []
    for words in script:
        if words[0] == "XREADGROUP":
            made += [("XGROUP", "CREATECONSUMER", key, words[2], words[3]) for key in ("k1", "k2")]
        elif words[0] in ("XCLAIM", "XAUTOCLAIM"):
            made.append(("XGROUP", "CREATECONSUMER", *words[1:4]))
        made.append(words)
    return made


def with_spans_apart(script: list[Words]) -> list[Words]:
    """The script with every time to live hours from any other, some growing along the script and some shrinking.

    Two equal ones are `GT` or not by the millisecond in which a broker read its clock.
    """
    apart: list[Words] = []
    for at, words in enumerate(script):
        if words[0] == "EXPIRE" and words[2] != "-1":
            hours = at if words[2] == "100" else 1000 - at
            words = (*words[:2], str(3600 * (hours + 1)), *words[3:])
        apart.append(words)
    return apart


EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    # The server is shared by the examples of a test; each begins with a flush.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@EXAMPLES
@given(script=st.lists(STREAM_COMMANDS, min_size=5, max_size=40))
def test_any_sequence_of_stream_commands_answers_alike(server: Wire, script: list[Words]) -> None:
    compare(server, with_consumers(script))


@EXAMPLES
@given(script=st.lists(VALUE_COMMANDS, min_size=5, max_size=40))
def test_any_sequence_of_value_commands_answers_alike(server: Wire, script: list[Words]) -> None:
    compare(server, with_spans_apart(script))
