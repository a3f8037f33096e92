"""Agents as objects with `on_message`, addressed by type and key, that send requests and publish to topics.

Read in this order:

    1. identity.py        AgentId, TopicId, AgentType, and their names on the broker
    2. message.py         what travels: the envelope around a message
    3. serialization.py   from a message to bytes and back, by type and content type; failures.py the same for errors
    4. context.py         what a handler and a factory see; cancellation.py its token
    5. subscription.py    which topics reach which agents; default_topic.py
    6. base_agent.py      agents: base_agent.py, routed.py, closure.py, proxy.py
    7. vocabulary.py      whose types the engine speaks: these, or another library's
    8. instances.py       the agent objects of one process
    9. actor.py           a handler's run as the durable core drives it: journal, effects, state
   10. host.py            the broker, and the consumers of this process
   11. requests.py        asking; publishing.py subscriptions and topics; saved.py the state of it all as JSON
   12. runtime.py         the runtime: what a program calls
"""
