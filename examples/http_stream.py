"""Stream an answer: run `jpaged serve demo`, then `python examples/http_stream.py`. Needs the package `openai`."""

from openai import OpenAI


def main() -> None:
    """Complete one prompt, and print each piece of the answer when it arrives."""
    with OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        prompt = "def split_path(path):"
        print(prompt, end="")
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=64, stop="\n\n", temperature=0, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
