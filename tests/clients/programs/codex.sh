export CODEX_HOME=$PWD/home
mkdir -p "$CODEX_HOME" work
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "rose"
check_for_update_on_startup = false
[model_providers.rose]
name = "rose"
base_url = "$ROSE_URL/v1"
env_key = "ROSE_KEY"
wire_api = "responses"
[analytics]
enabled = false
END
cd work
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Look into a.txt"
