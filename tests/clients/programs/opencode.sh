export HOME=$PWD/home
mkdir -p "$HOME" work
cd work
cat > opencode.json <<END
{"provider": {"rose": {"npm": "@ai-sdk/openai-compatible", "name": "rose",
  "options": {"baseURL": "$ROSE_URL/v1", "apiKey": "$ROSE_KEY"}, "models": {"policy": {"name": "policy"}}}},
 "model": "rose/policy", "small_model": "rose/policy", "autoupdate": false, "share": "disabled"}
END
exec opencode run --model rose/policy "Look into a.txt"
