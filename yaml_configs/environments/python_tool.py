"""A model that may run Python before it answers, by `<tool_call>{"name": "python", "arguments": {"code": "..."}}`.

The rows' prompts tell it so, and that the answer ends with \\boxed{}; `reward.function` judges the last turn.
"""

MOST = 4000  # characters of output that the model reads


async def rollout(ctx, prompt):
    while True:
        turn = await ctx.generate()
        if not turn.calls and not turn.call_error:
            return None  # its answer: the reward section scores it
        said = [{"role": "tool", "content": turn.call_error}] if turn.call_error else []
        for call in turn.calls:
            said.append({"role": "tool", "content": await answer(ctx, call)})
        ctx.say(said)


async def answer(ctx, call):
    code = call.arguments.get("code")
    if call.name != "python" or not isinstance(code, str):
        return 'there is one tool: python, with the argument "code", a text'
    ended = await ctx.sandbox(code)
    return (ended.stdout + ended.stderr)[-MOST:] + ("" if ended.ok else f"\n[{ended.how}]")
