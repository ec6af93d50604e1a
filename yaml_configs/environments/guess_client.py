"""Guess a number of 0 to 6 in three turns: an agent that talks to OpenAI's API, and to whoever answers there."""

from openai import OpenAI

CLIENT = OpenAI(base_url="http://of-each-trajectory", api_key="of each trajectory")  # connections are shared


def play(ctx, prompt):
    model = CLIENT.with_options(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key)
    messages = [{"role": "user", "content": ctx.row["prompt"]}]
    for _ in range(3):
        said = model.chat.completions.create(model="guesser", messages=messages).choices[0].message.content
        guess = int(said[0]) if said[:1] in tuple("0123456") else 7
        if guess == ctx.row["number"]:
            return 1.0
        hint = "<" if guess > ctx.row["number"] else ">"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return 0.0
