// Runs NVIDIA's own NRI plugin alone, which the GPU operator starts inside its toolkit's installer:
// containers whose pod is annotated nvidia.cdi.k8s.io/container.NAME get the CDI devices named there.
package main

import (
	"context"
	"flag"
	"os/signal"
	"strings"
	"syscall"

	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk-installer/container/runtime/nri"
	"github.com/sirupsen/logrus"
)

func main() {
	socket := flag.String("socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	allowed := flag.String("namespaces", "", "namespaces that may have management devices, by comma")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	logger := logrus.New()
	plugin := nri.NewPlugin(ctx, logger, strings.Split(*allowed, ","))
	if err := plugin.Start(ctx, *socket, "10"); err != nil {
		logger.Fatal(err)
	}
	<-ctx.Done()
	plugin.Stop()
}
