"""`python -m hf_linattn` is `hf-linattn`."""

from hf_linattn.cli import app

if __name__ == "__main__":
    app(prog_name="hf-linattn")
