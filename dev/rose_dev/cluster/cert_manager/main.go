// cert-manager's own controllers of certificates and of authorities that lie in the cluster.
//
// Its commands are modules of their own that no Go proxy serves; what they start is in the module
// that one does. Left out are ACME, other vendors' issuers, the election of a leader and the
// webhook, which only says early what is wrong with an object.
package main

import (
	"context"
	"flag"
	"os/signal"
	"sync"
	"syscall"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/cert-manager/cert-manager/pkg/controller"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/clusterissuers"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
	"github.com/cert-manager/cert-manager/pkg/metrics"
)

const workersOfEach = 1

func main() {
	kubeconfig := flag.String("kubeconfig", "", "of a client that may read and write its kinds and Secrets")
	own := flag.String("namespace", "cert-manager", "where Secrets of ClusterIssuers lie")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		Kubeconfig:         *kubeconfig,
		KubernetesAPIQPS:   20, // as its command sets them
		KubernetesAPIBurst: 50,
		Clock:              clock.RealClock{},
		Metrics:            metrics.New(klog.Background(), clock.RealClock{}),
		IssuerOptions:      controller.IssuerOptions{ClusterResourceNamespace: *own},
	})
	if err != nil {
		klog.Fatal(err)
	}
	shared, err := factory.Build()
	if err != nil {
		klog.Fatal(err)
	}
	var running sync.WaitGroup
	for name, construct := range controller.Known() {
		one, err := construct(factory)
		if err != nil {
			klog.Fatalf("%s: %v", name, err)
		}
		running.Go(func() {
			if err := one.Run(workersOfEach, ctx); err != nil {
				klog.Fatalf("%s: %v", name, err)
			}
		})
	}
	shared.SharedInformerFactory.Start(ctx.Done())
	shared.KubeSharedInformerFactory.Start(ctx.Done())
	running.Wait()
}
