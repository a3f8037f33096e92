"""Agents that a model drives: a model is asked, and what it calls is done, until it answers.

    1. agent.py, settings.py       LLMAgent, what an app declares; how its model is called
    2. definition.py, asked.py     the agent as the runtime knows it; the forms of its input
    3. loop.py                     the conversation of one run; messages.py: what it is made of
    4. toolset.py                  what the model may call, and by which names
    5. decision.py                 what is to be done with an answer, journaled with it; output.py, approval.py help
    6. guards.py, handoff.py       what ends a conversation, and what hands it over
    7. call.py                     one model call until it is answered; window.py, prices.py, estimate.py: within limits
    8. client.py, failures.py      the provider, and its errors; models.py, pacing.py, pieces.py: around its connections

Nothing here imports the client of models before the first call.
"""
