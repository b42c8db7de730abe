// A DRA driver for the device class gpu.nvidia.com over the kubelet's own plugin API: the node's GPUs
// as a ResourceSlice, handed out as CDI devices. NVIDIA's own driver is not on the module proxy.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	api "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	driver = "gpu.nvidia.com"
	kind   = "nvidia.com/gpu" // of the CDI devices
)

// plugin hands out what the scheduler has allocated; there is nothing to prepare on the node.
type plugin struct {
	uuids map[string]string // by the device's name in the slice
}

func (p *plugin) PrepareResourceClaims(_ context.Context, claims []*api.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	prepared := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		prepared[claim.UID] = p.prepare(claim)
	}
	return prepared, nil
}

func (p *plugin) prepare(claim *api.ResourceClaim) (result kubeletplugin.PrepareResult) {
	for _, one := range claim.Status.Allocation.Devices.Results {
		if one.Driver != driver {
			continue
		}
		uuid, known := p.uuids[one.Device]
		if !known {
			return kubeletplugin.PrepareResult{Err: fmt.Errorf("no device %s on this node", one.Device)}
		}
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests:     []string{one.Request},
			PoolName:     one.Pool,
			DeviceName:   one.Device,
			CDIDeviceIDs: []string{kind + "=" + uuid},
		})
	}
	return result
}

func (p *plugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	done := map[types.UID]error{}
	for _, claim := range claims {
		done[claim.UID] = nil
	}
	return done, nil
}

func (p *plugin) HandleError(_ context.Context, err error, message string) {
	log.Printf("%s: %v", message, err)
}

// devices are the node's GPUs, named as NVIDIA's driver names them, and their UUIDs.
func devices() ([]api.Device, map[string]string, error) {
	count, code := nvml.DeviceGetCount()
	if code != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("NVML: %s", nvml.ErrorString(code))
	}
	var found []api.Device
	uuids := map[string]string{}
	for index := 0; index < count; index++ {
		gpu, code := nvml.DeviceGetHandleByIndex(index)
		if code != nvml.SUCCESS {
			log.Printf("GPU %d: %s", index, nvml.ErrorString(code))
			continue
		}
		uuid, first := gpu.GetUUID()
		product, second := gpu.GetName()
		memory, third := gpu.GetMemoryInfo()
		minor, fourth := gpu.GetMinorNumber()
		for _, code := range []nvml.Return{first, second, third, fourth} {
			if code != nvml.SUCCESS {
				return nil, nil, fmt.Errorf("GPU %d: %s", index, nvml.ErrorString(code))
			}
		}
		name, type_ := fmt.Sprintf("gpu-%d", minor), "gpu"
		uuids[name] = uuid
		found = append(found, api.Device{
			Name: name,
			Attributes: map[api.QualifiedName]api.DeviceAttribute{
				"type":        {StringValue: &type_},
				"uuid":        {StringValue: &uuid},
				"productName": {StringValue: &product},
			},
			Capacity: map[api.QualifiedName]api.DeviceCapacity{
				"memory": {Value: *resource.NewQuantity(int64(memory.Total), resource.BinarySI)},
			},
		})
	}
	return found, uuids, nil
}

func run() error {
	root := flag.String("kubelet", "/var/lib/kubelet", "the kubelet's root")
	kubeconfig := flag.String("kubeconfig", "", "of the node")
	node := flag.String("node", "", "its name")
	library := flag.String("library", "libnvidia-ml.so.1", "NVML")
	flag.Parse()
	nvml.SetLibraryOptions(nvml.WithLibraryPath(*library))
	if code := nvml.Init(); code != nvml.SUCCESS {
		return fmt.Errorf("NVML: %s", nvml.ErrorString(code))
	}
	gpus, uuids, err := devices()
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(*root, "plugins", driver)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	helper, err := kubeletplugin.Start(ctx, &plugin{uuids},
		kubeletplugin.DriverName(driver), kubeletplugin.NodeName(*node), kubeletplugin.KubeClient(client),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(*root, "plugins_registry")))
	if err != nil {
		return err
	}
	defer helper.Stop()
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: gpus}}}
	resources := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{*node: pool}}
	if err := helper.PublishResources(ctx, resources); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
