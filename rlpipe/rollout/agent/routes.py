"""Routes of the APIs for agents, with and without a session.

    {gateway}/sessions/<session id>/v1/…     one rollout: its replies become samples
    {gateway}/v1/…                           without a session

Entry point: `agent_routes`.
"""

from __future__ import annotations

from aiohttp import web

from rlpipe.rollout.agent.anthropic_api import Messages
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.openai_api import ChatCompletions, TextCompletions
from rlpipe.rollout.agent.responses_api import Responses


def agent_routes(sessions: ChatSessions) -> list[web.RouteDef]:
    """Return the routes to add to the gateway of the sessions."""
    messages = Messages(sessions)
    posts = {
        "chat/completions": ChatCompletions(sessions).complete,
        "completions": TextCompletions(sessions).complete,
        "responses": Responses(sessions).create,
        "messages": messages.create,
        "messages/count_tokens": messages.count_tokens,
    }

    async def models(request: web.Request) -> web.Response:
        entry = {"id": sessions.model, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return web.json_response({"object": "list", "data": [entry]})

    routes: list[web.RouteDef] = []
    for base in ("/v1", "/sessions/{session}/v1"):
        routes += [web.post(f"{base}/{path}", handler) for path, handler in posts.items()]
        routes.append(web.get(f"{base}/models", models))
    return routes
