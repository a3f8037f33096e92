"""An HTTP server with OpenAI's chat completions and responses, for tests of agents that a model drives.

It runs as a process of its own, so that it outlives whatever a test kills. What it answers is decided by a
script: rules, as data, in order. The first rule that matches a request, and is not used up, answers it. A rule
looks at the request alone (`When` in `script.py` lists what it may ask for), so that the same request has the
same answer, from whichever process it comes. What was asked, and what was answered whole, is in a ledger.

Reading order: `script.py` (rules and how one is chosen), `asked.py` (what a request says), `chat.py` and
`responses.py` (the two formats), `wire.py` (HTTP), `serving.py` (one request from its first to its last byte),
`ledger.py`, `control.py` (what a test may ask of the server), `driver.py` (the test's side of all this).

    def test_a_question(openai_server: OpenAIServer) -> None:
        openai_server.play(answer("Rain.", when=When(tool_results=1)), calls(("weather", {"city": "Bern"})))
        AsyncOpenAI(base_url=openai_server.url, api_key=openai_server.key, max_retries=0)

Rules, an example of each kind (`driver.py` offers the functions; the JSON in a comment is what travels):

    answer("Rain.")                                  # {"answer": {"text": "Rain."}}
    answer("As you said: {user}")                    # {user} {system} {conversation} {result} {results} {turn}
    answer("Rain.", usage=Usage(input=10, output=2)) # else counted from the lengths, the same each time
    answer("Ra", finish_reason="length")
    calls(("weather", {"city": "Bern"}), ("time", {}))       # two tool calls in parallel
    calls(("weather", '{"city": '))                  # arguments that are no JSON
    output({"city": "Bern"})                         # as response_format asks, else as a call of `final_result`
    refusal("I must not.")
    turns(calls(("weather", {})), answer("Rain."))   # by the number of the model's messages so far: 0, 1, …
    rate_limited(after=2, times=3)                   # 429 for the first three requests of each conversation
    rate_limited(after_ms=50, in_all=10)             # for the first ten of all; `seconds=`: for a while
    rate_limited(after=2, date=True, until="calm")   # an HTTP date; until the test releases the gate `calm`
    failing(503, probability=0.2, seed=7)            # the same requests in each run
    broken("{not JSON"), broken("")                  # status 200, and such a body
    cut(answer("Rain."), after=2)                    # the connection ends behind two pieces
    cut(answer("Rain."), headers=False)              # … before anything was sent
    cut(answer("Rain."), error="Gone.")              # a stream says an error in place of the rest
    gated(answer("Rain."), "rain", after=2)          # two pieces, then silence until `release("rain", pieces=1)`
    gated(answer("Rain."), "{conversation}")         # a gate for each conversation
    output({"city": 1}).but(times=2), output({"city": "Bern"})       # breaks its schema twice

A stream's pieces are its events: the opening (one for chat, several for responses), then deltas, then the end.
An answer that is not streamed has two pieces: the halves of its body.

A request belongs to the conversation that its header `x-conversation` names, else its field `user`, else a mark
such as `[c-17]` in its first user message, else to one of its own (a digest of its first user message).

An answer's id ends in the number that its request has in the ledger. A header `x-asked-by` is kept there.

Models are known that the script names in `models` (`play(…, models=["gpt-test"])`); without it, all are. The
accepted key is `test-key`, or what `--key` says. A request that no rule matches is a bad request (400), and says
so.
"""
