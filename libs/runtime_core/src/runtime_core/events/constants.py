"""What messages are about: their categories and topics, under AWorld's names."""

from __future__ import annotations


class Constants:
    """Categories: which handler takes a message. Any other text is a category of the user's own."""

    AGENT = "agent"
    TOOL = "tool"
    TASK = "task"
    PLAN = "plan"
    OUTPUT = "output"
    TOOL_CALLBACK = "tool_callback"
    AGENT_CALLBACK = "agent_callback"
    GROUP = "group"
    HUMAN = "human"
    HUMAN_RESPONSE = "human_response"
    MEMORY = "memory"
    CONTEXT = "context"
    CONTEXT_RESPONSE = "context_response"
    CHUNK = "chunk"
    BACKGROUND_TASK = "background_task"


class TopicType:
    """Topics: what a message wants of its handler. Any other text is a topic of the user's own."""

    START = "__start"
    FINISHED = "__finished"
    OUTPUT = "__output"
    ERROR = "__error"
    RERUN = "__rerun"
    HUMAN_CONFIRM = "__human_confirm"
    CANCEL = "__cancel"
    INTERRUPT = "__interrupt"
    SUBSCRIBE_TOOL = "__subscribe_tool"
    SUBSCRIBE_AGENT = "__subscribe_agent"
    GROUP_ACTIONS = "__group_actions"
    GROUP_RESULTS = "__group_results"
    AGENT_RESULT = "__agent_result"
    SYSTEM_PROMPT = "__system_prompt"
    TOOL_RESULT = "__tool_result"
    TASK_RESPONSE = "__task_response"
    BACKGROUND_TOOL_COMPLETE = "__background_tool_complete"
    BACKGROUND_TASK_COMPLETE = "__background_task_complete"
    PEER_BROADCAST = "__peer_broadcast"


class Priority:
    """Lower numbers go first; among equal ones, the order of emission."""

    ERROR = -10
    CANCEL = -5
    MEMORY = -2
    HUMAN = -1
    NORMAL = 0
