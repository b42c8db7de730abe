export HOME=$PWD/home ANTHROPIC_BASE_URL=$ROSE_URL ANTHROPIC_API_KEY=$ROSE_KEY ANTHROPIC_MODEL=policy
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
mkdir -p "$HOME" work
cd work
exec claude -p --dangerously-skip-permissions "Look into a.txt"
