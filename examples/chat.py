"""A small streaming chat in the terminal, with the official OpenAI client: ``python examples/chat.py [URL]``."""

from __future__ import annotations

import sys

from openai import APIError, OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    print(f"{model} at {url}. An empty line or Ctrl-D ends it.")
    messages: list[dict[str, str]] = []
    while (said := ask()) != "":
        messages.append({"role": "user", "content": said})
        answer = ""
        try:
            for chunk in client.chat.completions.create(model=model, messages=messages, temperature=0.3, stream=True):
                piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
                answer += piece
                print(piece, end="", flush=True)
            print()
        except APIError as error:
            print(f"\n[{error.message}]")
        messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
